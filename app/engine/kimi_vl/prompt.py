"""Turns a conversation into token ids through the checkpoint's own chat template, safely.

A template is text in, text out, so a user who types ``<|im_end|>`` could end their turn. Here the template never sees
what users wrote: it is rendered with random digits in place of each text, and the digits are then replaced by the
text's tokens, in which nothing is special. The rendering depends only on the roles and image counts of the turns, so
it is done once for each such shape.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from jinja2 import TemplateError

from app.engine.kimi_vl.tokenizer import KimiVLTokenizer
from app.engine.request import ClosedThinking, Role, Turn

IMAGE_TOKEN = "<|media_pad|>"
"""Stands for one image in the template, and for one image token in the prompt."""


class PromptError(ValueError):
    """The checkpoint's template cannot express this conversation."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where an image's tokens lie in the prompt."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids for the engine, and one span for each image, in order."""

    token_ids: list[int]
    images: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Text between two special tokens: template literals, and numbers of turns whose text goes there."""

    pieces: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Image:
    """The place of one image's tokens."""


_Part = tuple[int, ...] | _Run | _Image  # token ids that never change, or a place for something
_Shape = tuple[tuple[Role, int, bool], ...]  # role, images and "has text" of each turn


class PromptBuilder:
    """Builds prompts for one checkpoint. Thread-safe.

    Args:
        tokenizer: from :func:`~app.engine.kimi_vl.tokenizer.load_tokenizer`, with its chat template.

    Raises:
        PromptError: the tokenizer has no chat template, or no ``<|media_pad|>``.
    """

    def __init__(self, tokenizer: KimiVLTokenizer) -> None:
        if not tokenizer.chat_template:
            raise PromptError("the checkpoint has no chat template")
        self._tokenizer = tokenizer
        self._special_ids: dict[str, int] = tokenizer.get_added_vocab()
        if IMAGE_TOKEN not in self._special_ids:
            raise PromptError(f"the checkpoint has no {IMAGE_TOKEN} token")
        self._image_id = self._special_ids[IMAGE_TOKEN]
        names = sorted(self._special_ids, key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._structure = lru_cache(maxsize=256)(self._render)

    def build(
        self, turns: Sequence[Turn], image_tokens: Sequence[int] = (), thinking: ClosedThinking | None = None
    ) -> Prompt:
        """The prompt up to the point where the model's answer begins.

        Args:
            turns: oldest first, normally ending with the user's. A turn's images come before its text. Where there is
                no system turn, the template's default stands.
            image_tokens: number of tokens of each image, in the order of the turns.
            thinking: what the model's own turn begins with.

        Raises:
            PromptError: the template refuses these turns.
            ValueError: an unknown role, or not one number in ``image_tokens`` for each image of the turns.
        """
        for turn in turns:
            if turn.role not in get_args(Role):  # templates print the role as it is
                raise ValueError(f"unknown role {turn.role!r}")
        images = sum(turn.images for turn in turns)
        if images != len(image_tokens):
            raise ValueError(f"{images} images in the turns, but {len(image_tokens)} image token counts")
        ids: list[int] = []
        spans: list[Span] = []
        for part in self._structure(tuple((turn.role, turn.images, bool(turn.text)) for turn in turns)):
            if isinstance(part, _Run):
                text = "".join(turns[piece].text if isinstance(piece, int) else piece for piece in part.pieces)
                ids += self._tokenizer.encode_ordinary(text)
            elif isinstance(part, _Image):
                spans.append(Span(len(ids), image_tokens[len(spans)]))
                ids += [self._image_id] * spans[-1].length
            else:
                ids += part
        return Prompt(ids + self._encode_thinking(thinking), tuple(spans))

    def _encode_thinking(self, thinking: ClosedThinking | None) -> list[int]:
        """Special are the markers alone, and only where the checkpoint has special tokens of their names. Otherwise
        markers and text are encoded together, as the model itself wrote them."""
        if thinking is None:
            return []
        ids: list[int] = []
        ordinary = ""
        for piece, trusted in ((thinking.open, True), (thinking.text, False), (thinking.close, True)):
            if trusted and piece in self._special_ids:
                ids += [*self._tokenizer.encode_ordinary(ordinary), self._special_ids[piece]]
                ordinary = ""
            else:
                ordinary += piece
        return ids + self._tokenizer.encode_ordinary(ordinary)

    def _render(self, shape: _Shape) -> tuple[_Part, ...]:
        """Render the template for turns of this shape, and take the result apart."""
        key = "".join(secrets.choice("0123456789") for _ in range(32))  # digits survive trim, upper, tojson
        messages = [_message(*turn, f"{key}{number:06}") for number, turn in enumerate(shape)]
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise PromptError(f"the checkpoint's chat template refuses these turns: {error}") from error
        parts: list[_Part] = []
        for piece in self._specials.split(rendered):
            if piece == IMAGE_TOKEN:
                parts.append(_Image())
            elif piece in self._special_ids:
                parts.append((self._special_ids[piece],))
            elif key in piece:
                parts.append(_Run(_literals_and_turns(piece, key)))
            elif piece:
                parts.append(tuple(self._tokenizer.encode_ordinary(piece)))
        images = sum(isinstance(part, _Image) for part in parts)
        if images != sum(count for _, count, _ in shape):
            raise PromptError(f"the checkpoint's chat template shows {images} images of these turns")
        return tuple(parts)


def _message(role: Role, images: int, has_text: bool, sentinel: str) -> dict[str, Any]:
    text = sentinel if has_text else ""
    if not images:
        return {"role": role, "content": text}
    return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}


def _literals_and_turns(text: str, key: str) -> tuple[str | int, ...]:
    pieces = re.split(f"{key}([0-9]{{6}})", text)
    return tuple(int(piece) if number % 2 else piece for number, piece in enumerate(pieces) if piece)
