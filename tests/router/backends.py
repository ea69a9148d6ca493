"""Small tokenizers of several kinds, with several kinds of added tokens; and what texts are made of."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken as Added
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.router.chats import ODD

SPECIAL = ["<s>", "</s>", "<|a|>", "<|a|><|b|>", "|><|", "<|ab", "<think>"]
FRAGMENTS = [
    *ODD,
    *SPECIAL,
    *"ab< >|/\n\té",
    "<s",
    "s>",
    "[W]",
    " [L]",
    "[R] ",
    "[N]",
    "[n]",
    "word",
    " word",
    "Word-Wörd",
    "\u2581",
    "</s><s>",
    "ab" * 5,
]
CORPUS = ["the word is a word, ab abab <s> Word Grüße 123", " ".join(ODD), "def f(x): return x"] * 3


def byte_level(prefix_space: bool = False, **model: Any) -> Any:
    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return backend


def metaspace(scheme: str, split: bool = True) -> Any:
    backend = Tokenizer(models.BPE(unk_token="?", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["?"]))
    return backend


def legacy_llama() -> Any:
    backend = Tokenizer(models.BPE(unk_token="?", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["?"]))
    return backend


def bert() -> Any:
    backend = Tokenizer(models.WordPiece(unk_token="?"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["?"]))
    return backend


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=150, special_tokens=["?"], unk_token="?")
    )
    return backend


def tiktoken_like() -> Any:
    backend = byte_level(ignore_merges=True)
    backend.normalizer = normalizers.NFC()
    pattern = Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|[^\r\n\p{L}\p{N}]?\p{L}+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
]
PATTERNS = {
    "GPT-2": [_GPT2],
    "SmolLM": [r"\p{N}", _GPT2],
    "Llama 3": [_LLAMA3],
    "Qwen 2": [_LLAMA3.replace("{1,3}", "")],
    "Qwen 3.5": [
        _ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BLANKS
    ],
    "GPT-4": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "GPT-4o": [_CASED % (_ENDING + "?", _ENDING + "?", r"\p{N}{1,3}")],
    "Tekken": [_CASED % ("", "", r"\p{N}")],
    "DeepSeek 3": _DEEPSEEK3,
    "DeepSeek 3, as its file has line ends": [pattern.replace(r"\r\n", "\r\n") for pattern in _DEEPSEEK3],
    "Spark": [
        *_DEEPSEEK3[:2],
        _DEEPSEEK3[2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
        r"\p{N}",
    ],
    "MiniCPM 5": [r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")],
    "OLMo 2": [_LLAMA3],
    "MiniMax": [_CASED % (_ENDING + "?", _ENDING + "?", r"\p{N}{1,3}")],
}
"""The expressions by which the tokenizers of well-known models split texts, one after the other."""
REMOVED = {"OLMo 2", "MiniMax"}
"""Those that leave out what is between two matches."""


def split_as(kind: str) -> Any:
    """As one of ``PATTERNS``."""
    return split_by(PATTERNS[kind], removed=kind in REMOVED)


def split_by(patterns: list[str], *, removed: bool = False) -> Any:
    backend = Tokenizer(models.BPE())
    behavior = "removed" if removed else "isolated"
    splits = [pre_tokenizers.Split(Regex(pattern), behavior, invert=removed) for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return backend


def with_added(backend: Any, *, rstrip: bool = False) -> Any:
    backend.add_special_tokens([Added(text, normalized=False, rstrip=rstrip) for text in SPECIAL])
    backend.add_tokens([Added("[N]", normalized=True), Added("\u2581\u2581", normalized=True)])
    backend.add_special_tokens([Added("[L]", lstrip=True), Added("[R]", rstrip=True), Added("  ")])
    ids = {name: backend.token_to_id(name) for name in ("<s>", "</s>")}
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=list(ids.items())
    )
    return backend
