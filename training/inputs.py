"""What the model reads: patches of a picture and the token ids of a conversation, in the published prompt format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from training.tokenizer import DEFAULT_SYSTEM, THINK_CLOSE, THINK_OPEN, Tokenizer

PATCH = 14  # pixels
TOKEN = 28  # pixels a merged image token covers, each way


def to_patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    """uint8 patches (rows*cols, 588), channels first inside a patch, and (rows, cols).

    Pads right and bottom with black to multiples of 28 px. Pictures here are under the limit that would shrink them.
    """
    pixels = np.asarray(image, np.uint8)
    h, w = pixels.shape[:2]
    pixels = np.pad(pixels, ((0, -h % TOKEN), (0, -w % TOKEN), (0, 0)))
    rows, cols = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    blocks = pixels.reshape(rows, PATCH, cols, PATCH, 3).transpose(0, 2, 4, 1, 3)
    return blocks.reshape(rows * cols, 3 * PATCH * PATCH), (rows, cols)


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and how many of the last ones the model is to produce itself."""

    ids: list[int]
    supervised: int


def _turn(tokenizer: Tokenizer, role: str, body: list[int]) -> list[int]:
    special = tokenizer.special
    opening = [special[f"<|im_{role}|>"], *tokenizer.encode(role), special["<|im_middle|>"]]
    return [*opening, *body, special["<|im_end|>"]]


def prompt_ids(
    tokenizer: Tokenizer,
    question: str,
    image_tokens: Sequence[int],
    system: str | None = DEFAULT_SYSTEM,
    history: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The conversation up to the point where the model speaks.

    ``image_tokens`` has an entry for each image, its number of merged tokens. Images stand before the first question.
    """
    special = tokenizer.special
    ids: list[int] = []
    if system is not None:
        ids += _turn(tokenizer, "system", tokenizer.encode(system))
    media: list[int] = []
    for count in image_tokens:
        media += [special["<|media_start|>"], *tokenizer.encode("image"), special["<|media_content|>"]]
        media += [special["<|media_pad|>"]] * count + [special["<|media_end|>"]]
    for earlier, answer in history:
        ids += _turn(tokenizer, "user", media + tokenizer.encode(earlier))
        ids += _turn(tokenizer, "assistant", tokenizer.encode(answer))
        media = []
    ids += _turn(tokenizer, "user", media + tokenizer.encode(question))
    return [*ids, special["<|im_assistant|>"], *tokenizer.encode("assistant"), special["<|im_middle|>"]]


def example(tokenizer: Tokenizer, prompt: list[int], reasoning: str | None, answer: str, cut: float = -1.0) -> Example:
    """The prompt and the reply.

    Without reasoning the empty thinking block belongs to the prompt; with ``cut`` in 0..1 so does that share of the
    thinking, closed early; otherwise the model produces everything.
    """
    opening, closing = tokenizer.encode(THINK_OPEN), tokenizer.encode(THINK_CLOSE)
    reply = [*tokenizer.encode(answer), tokenizer.special["<|im_end|>"]]
    if reasoning is None:
        return Example([*prompt, *opening, *closing, *reply], len(reply))
    thought = tokenizer.encode(reasoning)
    if cut >= 0:
        thought = thought[: int(cut * (len(thought) + 1))]
        return Example([*prompt, *opening, *thought, *closing, *reply], len(reply))
    reply = [*opening, *thought, *closing, *reply]
    return Example([*prompt, *reply], len(reply))


def split_reply(text: str) -> tuple[str, str]:
    """(reasoning, answer) of a reply; the answer is empty where the thinking never ends."""
    thought, marker, answer = text.partition(THINK_CLOSE)
    return thought.removeprefix(THINK_OPEN), answer if marker else ""
