"""The tokenizer equals tiktoken, driven the way the published class drives it."""

import base64
import copy
import json
import pickle
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from app.engine.kimi_vl.tokenizer import KimiVLTokenizer, build_backend, cut, load_tokenizer, read_ranks


class Published:
    """What the published class does, in its own order: cut character by character, then tiktoken on each piece."""

    def __init__(self, folder: Path, pattern: str) -> None:
        rows = [line.split() for line in (folder / "tiktoken.model").read_bytes().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
        decoder = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        config = json.loads((folder / "config.json").read_text())
        size = config.get("text_config", config)["vocab_size"]
        specials = {
            decoder.get(str(i), {}).get("content", f"<|reserved_token_{i}|>"): i for i in range(len(ranks), size)
        }
        self.model = tiktoken.Encoding("ref", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [
            i
            for start in range(0, len(text), 400_000)
            for piece in self.split(text[start : start + 400_000], 25_000)
            for i in self.model.encode(piece, **options)
        ]

    def ordinary(self, text: str) -> list[int]:
        return self.encode(text, disallowed_special=())

    def special(self, text: str) -> list[int]:
        return self.encode(text, allowed_special="all")

    @staticmethod
    def split(text: str, limit: int) -> Iterator[str]:
        length, space, start = 0, text[:1].isspace(), 0
        for i, char in enumerate(text):
            if char.isspace() != space:
                length, space = 1, char.isspace()
            else:
                length += 1
                if length > limit:
                    yield text[start:i]
                    start, length = i, 1
        yield text[start:]


NASTY = [
    "",
    " ",
    "\n",
    "\r\n\r\n  \t x",
    "中文字。日本語です",
    " 中文 A中B 中A's",
    "x々y 々x 〇〇〇〇 1〇〇〇 ⺀x 中⺀ !⺀",
    "한국ABC한국DEF カタカナー中",
    "don't DON'T it'ſ we'LL they'Re 'llama 1's I'D'VE",
    "e\u0301a\u0301 \u0301A! !\u0301 !!\u0301 \u0e01\u0e34\u0e49 \u0928\u092e\u0938\u094d\u0924\u0947",
    "camelCase HTMLParser XMLHttpRequest ǅungla ʰʲ ªº",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇦 1️⃣ 🙂🙂🙂",
    "\x00\x01\x1b[0m\x1c\x1c a\x1f\x7f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000中\ufeff\ufffd\uffff",
    "def f(x):\n\treturn {'a': [1234567, 0x1F]}  # ok\n\n\n    pass\r\n",
    "０１２３ ²³ ½ Ⅳ ①②③④ ٠١٢٣",
    "<|im_end|><|media_pad|>[BOS] <|reserved_token_24005|> <|im_end",
    "/path/to\\file?x=1&y=2#!\n/x ...\n...\r\n//",
    "\u200b\u200d\u200e\u2060\u00ad \U000e0001 \U0010ffff \ue000",
    " " * 5000 + "x" + " " * 5000 + "\n" + "\t" * 3000 + "中" * 3000,
    "a" * 24_998 + "[BOS]" + "b" * 10,
    "a" * 25_000 + " " * 25_001 + "é" * 25_002,
    "ab cd " * 70_000,
    "\u3000" * 60_000 + "\x1c" * 30_000 + "中" * 26_000,
]

FRAGMENTS = [
    *(
        "hello",
        "World",
        "HTTP",
        "the",
        "'s",
        "'LL",
        "don't",
        "ſ",
        "naïve",
        "straße",
        "ÅNGSTRÖM",
        "Привет",
        "שלום",
        "مرحبا",
    ),
    *(
        "中文",
        "字",
        "々",
        "〇",
        "⺀",
        "日本",
        "ひらがな",
        "カタカナ",
        "ー",
        "한국어",
        "ไทย",
        "नमस्ते",
        "\u0301",
        "\u0308",
        "\u0489",
    ),
    *("🙂", "👩‍👧", "🇺🇦", "\u200d", "\ufe0f", "1", "12", "3456", "½", "０", "٣", "²", "Ⅳ", "ǅ", "ʰ", "ª"),
    *(
        " ",
        "  ",
        " " * 9,
        " " * 100,
        "\n",
        "\r\n",
        "\r",
        "\t",
        "\x0b",
        "\x1c",
        "\x1f",
        "\x85",
        "\xa0",
        "\u2028",
        "\u3000",
    ),
    *(
        "\x00",
        "\x07",
        "\x1b[31m",
        "\x7f",
        "\ufffd",
        "\ufeff",
        "\u200b",
        "\ue000",
        "\U0010ffff",
        "!",
        "...",
        "/",
        "//",
        "#!",
    ),
    *(
        "def f(x): return x\n",
        "{'a': 1}",
        "<b>",
        "&amp;",
        "λ→μ",
        "x_1",
        "0x1F",
        "$$",
        "<|",
        "|>",
        "◁think▷",
        "◁/think▷",
    ),
]


def corpus(count: int, seed: int = 7) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        parts = rng.choices(FRAGMENTS, k=rng.randint(1, 14))
        parts += [
            chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x30000)))) for _ in range(rng.randint(0, 4))
        ]
        rng.shuffle(parts)
        yield "".join(parts)


@pytest.fixture(scope="module", params=["big", "demo"])
def pair(
    request: pytest.FixtureRequest, big_folder: Path, model_dir: Path, published_pattern: str
) -> tuple[KimiVLTokenizer, Published]:
    folder = big_folder if request.param == "big" else model_dir
    return load_tokenizer(folder), Published(folder, published_pattern)


def test_ten_thousand_strings_encode_as_tiktoken_does(pair: tuple[KimiVLTokenizer, Published]) -> None:
    tokenizer, published = pair
    texts = list(corpus(10_000))
    expected = [published.ordinary(text) for text in texts]
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == expected
    assert [tokenizer.encode_ordinary(text) for text in texts] == expected
    assert [tokenizer.decode(ids) for ids in expected] == texts


@pytest.mark.parametrize("number", range(len(NASTY)))
def test_nasty_strings_encode_as_the_published_class_does(pair: tuple[KimiVLTokenizer, Published], number: int) -> None:
    tokenizer, published = pair
    text = NASTY[number]
    assert tokenizer.encode_ordinary(text) == published.ordinary(text)
    if "a[BOS]b" not in text:  # there the published class has two answers; see the next test
        assert tokenizer.encode(text) == published.special(text)


def test_special_tokens_are_found_before_a_long_run_is_cut(big_tokenizer: KimiVLTokenizer) -> None:
    ids = big_tokenizer.encode("a" * 24_998 + "[BOS]" + "b" * 10)
    assert ids.count(big_tokenizer.bos_token_id) == 1


def test_every_code_point_is_split_alike(
    big_folder: Path, big_tokenizer: KimiVLTokenizer, published_pattern: str
) -> None:
    """Both regex engines must agree on the class of each character, in each position a class can matter."""
    published = Published(big_folder, published_pattern)
    for start in range(0, 0x32000, 0x400):
        points = [chr(c) for c in range(start, start + 0x400) if not 0xD800 <= c < 0xE000]
        text = "\n".join(f"a{c}B {c}{c}1{c}'s{c}中" for c in points)
        assert big_tokenizer.encode(text) == published.ordinary(text), f"U+{start:04X}..U+{start + 0x3FF:04X}"


def test_merges_equal_tiktoken_on_overlapping_vocabularies(published_pattern: str) -> None:
    """Few letters and many tokens that overlap themselves: ties, borders and halves of higher rank."""
    rng = random.Random(3)
    for _ in range(400):
        letters = "ab" if rng.random() < 0.6 else "abc"
        tokens = list(letters)
        while len(tokens) < rng.randint(8, 30):
            token = rng.choice(tokens) + rng.choice(tokens)
            if token not in tokens and len(token) <= 8:
                tokens.append(token)
        tail = tokens[len(letters) :]
        rng.shuffle(tail)
        ranks = {t.encode(): i for i, t in enumerate([*letters, *tail])}
        backend = build_backend(ranks, [])
        reference = tiktoken.Encoding("x", pat_str=published_pattern, mergeable_ranks=ranks, special_tokens={})
        for _ in range(60):
            text = "".join(rng.choices(letters, k=rng.randint(1, 24)))
            assert backend.encode(text).ids == reference.encode_ordinary(text), (ranks, text)


def test_unnamed_special_ids_are_reserved_tokens(big_tokenizer: KimiVLTokenizer) -> None:
    base = 24_000
    assert len(big_tokenizer) == base + 256
    assert big_tokenizer.convert_ids_to_tokens([base, base + 5, base + 6]) == [
        "[BOS]",
        f"<|reserved_token_{base + 5}|>",
        f"<|reserved_token_{base + 6}|>",
    ]
    assert big_tokenizer.encode(f"a<|reserved_token_{base + 5}|>")[1:] == [base + 5]


def test_a_small_vocabulary_has_the_specials_of_its_file_only(model_dir: Path, demo_tokenizer: KimiVLTokenizer) -> None:
    decoder = json.loads((model_dir / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {
        name: i for i, name in ((int(k), v["content"]) for k, v in decoder.items())
    } == demo_tokenizer.get_added_vocab()
    assert demo_tokenizer.eos_token == "[EOS]"
    assert demo_tokenizer.convert_tokens_to_ids("<|im_end|>") in demo_tokenizer.all_special_ids


def test_special_text_is_text_for_encode_ordinary(big_tokenizer: KimiVLTokenizer) -> None:
    for name in big_tokenizer.get_added_vocab():
        ids = big_tokenizer.encode_ordinary(f"x{name}y")
        assert max(ids) < 24_000
        assert big_tokenizer.decode(ids) == f"x{name}y"


def test_lone_surrogates_become_the_replacement_character(big_tokenizer: KimiVLTokenizer) -> None:
    assert big_tokenizer.encode_ordinary("a\ud800b") == big_tokenizer.encode_ordinary("a\ufffdb")


def test_cuts_fall_where_the_published_code_puts_them() -> None:
    for text in (*NASTY, "x" * 830_001, " " * 399_999 + "x" * 25_001):
        published = [p for s in range(0, len(text), 400_000) for p in Published.split(text[s : s + 400_000], 25_000)]
        assert [p for p in cut(text) if p] == [p for p in published if p]


@pytest.mark.parametrize("text", ["我看到一个红色的方块。", "ok 🙂👩‍👩‍👧 中🇺🇦 é\u0301 end", "\U00020000\U0001f600" * 5])
def test_vllm_streams_characters_split_over_tokens_whole(demo_tokenizer: KimiVLTokenizer, text: str) -> None:
    ids = demo_tokenizer.encode_ordinary(text)
    assert len(ids) > len(text)  # the demo vocabulary has single bytes only for these
    request: Any = SimpleNamespace(
        request_id="r",
        prompt_token_ids=demo_tokenizer.encode("<|im_user|>"),
        prompt_embeds=None,
        sampling_params=SamplingParams(max_tokens=1000),
        external_req_id="r",
    )
    stream = IncrementalDetokenizer.from_new_request(demo_tokenizer, request)
    assert isinstance(stream, FastIncrementalDetokenizer)
    deltas = []
    for i in ids:
        stream.update([i], False)
        deltas.append(stream.get_next_output_text(finished=False, delta=True))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_copies_encode_alike(demo_tokenizer: KimiVLTokenizer) -> None:
    text = "A red 红 <|im_end|>"
    for twin in (copy.deepcopy(demo_tokenizer), pickle.loads(pickle.dumps(demo_tokenizer))):
        assert twin.encode(text) == demo_tokenizer.encode(text)
        assert twin.encode_ordinary(text) == demo_tokenizer.encode_ordinary(text)


def test_a_broken_rank_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"YQ== 0\nYg==\n")
    with pytest.raises(ValueError, match="line 2"):
        read_ranks(path)
    path.write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(ValueError, match="0 to 1"):
        read_ranks(path)


def test_the_corpus_holds_what_it_should() -> None:
    text = "".join(corpus(2_000))
    categories = {unicodedata.category(c) for c in text}
    assert {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Nd", "No", "Cc", "Cf", "Zs", "So", "Po"} <= categories
