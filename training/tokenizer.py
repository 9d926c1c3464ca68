"""The demo model's tokenizer: a small byte-level BPE in the published tiktoken layout.

``python -m training.tokenizer FILE`` makes it. Every capital letter and every digit stays a token of its own, so
that the letters of a sign are so many tokens.
"""

from __future__ import annotations

import base64
import inspect
import random
import re
import sys
import textwrap
from pathlib import Path

import tiktoken

from training.questions import TASKS, ask, vary
from training.scenes import CHARACTERS, draw_scene

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
THINK_OPEN, THINK_CLOSE = "◁think▷", "◁/think▷"
DEFAULT_SYSTEM = "You are a helpful assistant"
VOCABULARY = 640


class Tokenizer:
    """Ordinary text and special tokens of a checkpoint folder's ``tiktoken.model``."""

    def __init__(self, path: Path) -> None:
        pairs = (line.split() for line in path.read_text().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        self.special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.vocab_size = len(ranks) + len(SPECIAL_TOKENS)
        self._encoding = tiktoken.Encoding(
            "askimage-demo", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing in it becomes a special token."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encoding.encode_ordinary(text)
            if len(self._cache) < 20_000:
                self._cache[text] = ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def _corpus() -> list[str]:
    """The sentences of the tasks, without capitals in a row, and a little general English."""
    rng = random.Random(1)
    lines: list[str] = []
    for i in range(3000):
        scene = draw_scene(rng, (112, 112), shapes=rng.randint(1, 4), plain=True)
        item = ask(rng, list(TASKS)[i % 7], scene)
        if item:
            lines += [item.question, vary(rng, item.question), item.reasoning, item.answer]
    for _ in range(1500):
        item = ask(rng, "read", draw_scene(rng, (112, 112), shapes=1, plain=True))
        assert item is not None
        lines += [item.question, vary(rng, item.question), "The sign reads", " a sign that says"]
    lines += [f" {character}" for character in CHARACTERS if character.isalpha()] * 200
    lines += ["user", "assistant", "system", "image", DEFAULT_SYSTEM, THINK_OPEN, THINK_CLOSE] * 400
    lines += re.findall(r"[^\n]+", inspect.getdoc(textwrap) or "") + re.findall(r"[^\n]+", re.__doc__ or "")
    return [re.sub(r"[A-Z]{2,}|[0-9]{2,}", "", line) for line in lines]


def build(path: Path, vocabulary: int = VOCABULARY) -> None:
    """Learn the merges and write lines of ``base64(token) rank``."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as RustTokenizer

    rust = RustTokenizer(models.BPE())
    rust.decoder = decoders.ByteLevel()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(_corpus(), trainer)
    byte_of = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = (b for b in range(256) if b not in byte_of.values())
    byte_of |= {chr(256 + i): b for i, b in enumerate(list(rest))}
    with path.open("w") as file:
        for token, rank in sorted(rust.get_vocab().items(), key=lambda pair: pair[1]):
            file.write(f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}\n")


def check(path: Path) -> None:
    """What the training relies on: single letters and digits, and markers that split the same in any context."""
    tokenizer = Tokenizer(path)
    for text in ("OPEN", "24", "A1B2", "QZXW"):
        assert len(tokenizer.encode(text)) == len(text), text
    assert tokenizer.encode(THINK_OPEN + THINK_CLOSE) == tokenizer.encode(THINK_OPEN) + tokenizer.encode(THINK_CLOSE)
    print(tokenizer.vocab_size, "tokens;", THINK_OPEN, "is", len(tokenizer.encode(THINK_OPEN)))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    check(Path(sys.argv[1]))
