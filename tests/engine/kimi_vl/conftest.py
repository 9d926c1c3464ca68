"""A Kimi-VL folder with a vocabulary large enough for merges to matter, trained here from text that is at hand."""

import base64
import json
import random
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from app.engine.kimi_vl.tokenizer import KimiVLTokenizer, load_tokenizer

# The pattern of the published tokenization_moonshot.py, written down a second time so that a slip in ours shows.
PUBLISHED_PATTERN = (
    r"""[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
BIG_RANKS = 24_000
NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    18: "<|media_start|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Offsets of the named special ids from the first one, as in the published vocabulary (163584 + offset)."""


def training_text() -> list[str]:
    """Python's own sources, and made-up Chinese, Japanese, Korean, Cyrillic and emoji with repeating pairs."""
    rng = random.Random(1)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    for first, last in ((0x4E00, 0x5200), (0x3041, 0x3096), (0xAC00, 0xAD00), (0x410, 0x44F), (0x1F600, 0x1F640)):
        letters = [chr(c) for c in range(first, last)]
        words = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(1500)]
        texts += [" ".join(rng.choices(words, k=40)) + "。" for _ in range(150)]
        texts += ["".join(rng.choices(words, k=40)) + "，" for _ in range(150)]
    return texts


def write_folder(folder: Path, ranks: list[bytes]) -> Path:
    """A published-looking tokenizer folder: ranks, named special ids with gaps, and the vocabulary's size."""
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {str(len(ranks) + i): {"content": name, "special": True} for i, name in NAMES.items()}
    config = {"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": len(ranks) + 256}}))
    return folder


@pytest.fixture(scope="session")
def published_pattern() -> str:
    return PUBLISHED_PATTERN


@pytest.fixture(scope="session")
def big_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainee = Tokenizer(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PUBLISHED_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BIG_RANKS, initial_alphabet=alphabet, show_progress=False)
    trainee.train_from_iterator(training_text(), trainer)
    vocab = trainee.get_vocab()
    to_byte = {char: byte for byte, char in _byte_characters().items()}
    ranks = [bytes(to_byte[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)]
    assert len(ranks) == BIG_RANKS
    return write_folder(tmp_path_factory.mktemp("big"), ranks)


def _byte_characters() -> dict[int, str]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}


@pytest.fixture(scope="session")
def big_tokenizer(big_folder: Path) -> KimiVLTokenizer:
    return load_tokenizer(big_folder)


@pytest.fixture(scope="session")
def demo_tokenizer(model_dir: Path) -> KimiVLTokenizer:
    return load_tokenizer(model_dir)
