"""Kimi's tokenizer, built from the checkpoint's own ``tiktoken.model``, with no code from the checkpoint.

The published repositories ship ``tiktoken.model`` (lines ``base64(token) rank``) and a Python class around
``tiktoken``. That class does not import under transformers 5, and transformers' stock conversion uses another
splitting pattern, which silently gives other tokens for Chinese or mixed-case text. Here two engines share one file:

* a Rust ``tokenizers`` backend, so that transformers and vLLM see an ordinary fast tokenizer (and vLLM its fast
  incremental detokenizer);
* ``tiktoken`` itself for :meth:`KimiVLTokenizer.encode_ordinary`, where special-token text stays text.

Facts taken from the published ``tokenization_moonshot.py``: the pattern, the 256 special ids that follow the base
ranks, their ``<|reserved_token_N|>`` names (N is the id), and the cutting of long texts before BPE.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import BatchEncoding, PreTrainedTokenizerFast

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
"""Splits text into the pieces that BPE works on. ``&&`` is class intersection in both regex engines."""

MAX_CHARS = 400_000
MAX_RUN = 25_000
RESERVED = 256
_RUNS = re.compile(r"\s+|\S+")  # Python's \s is str.isspace(), which is what the published code asks


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read ``tiktoken.model``: token bytes to rank.

    Raises:
        ValueError: a line is not ``base64 rank``, or the ranks are not 0..n-1.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected 'base64-token rank'") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: ranks are not the numbers from 0 to {len(ranks) - 1}")
    return ranks


def special_tokens(base: int, vocab_size: int | None, named: dict[int, AddedToken]) -> list[AddedToken]:
    """The special tokens in id order, starting at id ``base``.

    256 ids follow the base ranks, fewer where the model's embedding has no room for them (small vocabularies).
    Ids that the tokenizer's configuration does not name are ``<|reserved_token_ID|>``.

    Raises:
        ValueError: a named id lies outside this range.
    """
    count = RESERVED if vocab_size is None else min(RESERVED, vocab_size - base)
    outside = sorted(i for i in named if not base <= i < base + count)
    if outside:
        raise ValueError(f"special token ids {outside} lie outside {base}..{base + count - 1}")
    return [
        named.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True, normalized=False)
        for i in range(base, base + count)
    ]


def cut(text: str) -> Iterator[str]:
    """Cut a text as Kimi's code does before BPE: every 400,000 characters, and inside any run of more than 25,000
    characters with (or without) white space. Nearly every text comes back whole."""
    if len(text) <= MAX_RUN:
        yield text
        return
    for start in range(0, len(text), MAX_CHARS):
        chunk = text[start : start + MAX_CHARS]
        begin = 0
        for run in _RUNS.finditer(chunk):
            for position in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield chunk[begin:position]
                begin = position
        yield chunk[begin:]


def build_backend(ranks: dict[bytes, int], specials: list[AddedToken]) -> Tokenizer:
    """The Rust tokenizer equal to ``tiktoken`` on these ranks.

    tiktoken merges the adjacent pair whose concatenation has the lowest rank, the leftmost one on a tie. As a merge
    list that is every split of every token into two tokens, ordered by the token's rank.
    """
    to_unicode = {byte: char for char, byte in _byte_alphabet().items()}
    vocab = {token.decode("latin-1").translate(to_unicode): rank for token, rank in ranks.items()}
    merges = [
        (token[:i], token[i:])
        for token in sorted(vocab, key=vocab.__getitem__)
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(specials)
    return backend


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: the printable ones stand for themselves, the others for U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}


class OrdinaryEncoder:
    """``tiktoken`` over the base ranks, with Kimi's cuts and no special tokens. Thread-safe and immutable."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self._encoding = tiktoken.Encoding("kimi_vl", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def __deepcopy__(self, memo: dict[int, Any]) -> "OrdinaryEncoder":
        return self  # vLLM deep-copies tokenizers into a pool; nothing here changes

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Lone surrogates count as U+FFFD."""
        return [i for piece in cut(text) for i in self._encoding.encode_ordinary(piece)]


class KimiVLTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """transformers' fast tokenizer over :func:`build_backend`; build it with :func:`load_tokenizer`."""

    def __init__(self, backend: Tokenizer, ordinary: OrdinaryEncoder, **kwargs: Any) -> None:
        self._tokenizer = backend  # as transformers' own classes do: handing it over as an argument deep-copies it
        super().__init__(**kwargs)
        self._ordinary = ordinary

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a special token: the only way to encode what a user typed.

        ``<|im_end|>`` in ``text`` comes out as the tokens of its characters. Thread-safe; releases the GIL.
        """
        return self._ordinary.encode(text)

    def _encode_plus(self, text: Any, *args: Any, is_split_into_words: bool = False, **kwargs: Any) -> BatchEncoding:
        """transformers' one way to the backend. A long text goes there in the pieces of :func:`cut`, as "words"."""
        if isinstance(text, str) and not is_split_into_words:
            pieces = self._cut_between_specials(text)
            if len(pieces) > 1:
                return super()._encode_plus(pieces, *args, is_split_into_words=True, **kwargs)
        return super()._encode_plus(text, *args, is_split_into_words=is_split_into_words, **kwargs)

    def _cut_between_specials(self, text: str) -> list[str]:
        """The published class finds special tokens first and cuts what lies between them."""
        if len(text) <= MAX_RUN:
            return [text]
        names = "|".join(re.escape(name) for name in self.get_added_vocab())
        pieces = [""]
        for part in re.split(f"({names})", text):
            first, *rest = cut(part)
            pieces[-1] += first
            pieces += rest
        return pieces


def load_tokenizer(folder: str | Path, **kwargs: Any) -> KimiVLTokenizer:
    """Load the tokenizer of a Kimi-VL checkpoint folder; nothing in the folder is executed.

    Reads ``tiktoken.model`` and ``tokenizer_config.json``, and from ``config.json`` (if there) the vocabulary's size.
    ``kwargs`` go to transformers' constructor (``truncation_side``, ``padding_side``, ...).

    Raises:
        FileNotFoundError: the folder has no ``tiktoken.model`` or no ``tokenizer_config.json``.
        ValueError: the files contradict each other.
    """
    folder = Path(folder)
    ranks = read_ranks(folder / "tiktoken.model")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {
        int(i): AddedToken(
            token["content"],
            special=token.get("special", True),
            normalized=token.get("normalized", False),
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
            single_word=token.get("single_word", False),
        )
        for i, token in config.get("added_tokens_decoder", {}).items()
    }
    specials = special_tokens(len(ranks), _vocab_size(folder), named)
    options = {
        name: config[name]
        for name in ("bos_token", "eos_token", "unk_token", "pad_token", "model_max_length", "padding_side")
        if config.get(name) is not None
    }
    tokenizer = KimiVLTokenizer(
        build_backend(ranks, specials),
        OrdinaryEncoder(ranks),
        **options
        | {
            "extra_special_tokens": config.get("additional_special_tokens") or [],
            "chat_template": chat_template(folder, config),
            "clean_up_tokenization_spaces": False,
        }
        | kwargs,
    )
    tokenizer.name_or_path = str(folder)
    return tokenizer


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The checkpoint's chat template: ``chat_template.jinja``, or the one inside ``tokenizer_config.json``."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    return template if isinstance(template, str) else None


def _vocab_size(folder: Path) -> int | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size = config.get("text_config", {}).get("vocab_size", config.get("vocab_size"))
    return None if size is None else int(size)
