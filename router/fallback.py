"""Why a request is routed by load instead of by what replicas have cached."""

from __future__ import annotations

import msgspec


class Fallback(msgspec.Struct, frozen=True):
    """``code`` is a bounded label for metrics; ``text`` says it to people, with nothing of the request."""

    code: str
    text: str


NO_INDEX = Fallback("no-index", "no index is configured; give --map or --indexer")
NO_KEY = Fallback("no-key", "the request has no key that the policy goes by")
NO_TOKENS = Fallback("no-tokens", "the policy goes by tokens, which are not known on this path")
NO_PROMPT = Fallback("no-prompt", "the request holds no prompt")
PROMPT_EMBEDS = Fallback("prompt-embeds", "prompt embeddings have no token ids")
MULTIMODAL = Fallback(
    "multimodal", "messages with other than text parts have no known tokens without a local tokenizer"
)
TRUNCATED = Fallback("truncate-prompt-tokens", "a prompt that the engine truncates has no known tokens")
BAD_TOKEN_IDS = Fallback("bad-token-ids", "token ids outside 0 to 2**32-1")
UNREADABLE_PROMPT = Fallback("unreadable-prompt", "a prompt of unknown form")
UNREADABLE_MESSAGES = Fallback("unreadable-messages", "messages of unknown form")
UNREADABLE_BODY = Fallback("unreadable-body", "a body that this router cannot read")
TOO_MANY_VALUES = Fallback("too-many-values", "a body of more JSON values than are read")
BAD_CACHE_SALT = Fallback("bad-cache-salt", "a cache_salt that is no text")
TOKENIZE_BUSY = Fallback("tokenize-busy", "too many prompts wait for a tokenizing thread")
TOKENIZE_MISSING = Fallback("tokenize-missing", "the engine has no /tokenize")
TOKENIZE_TIMEOUT = Fallback("tokenize-timeout", "tokenising took longer than it may")
TOKENIZE_REFUSED = Fallback("tokenize-refused", "the engine's /tokenize refused the prompt")
TOKENIZE_FAILED = Fallback("tokenize-failed", "the engine's /tokenize failed")
MODEL_UNKNOWN = Fallback("model-unknown", "no replica has said its models yet")
MODEL_NOT_INDEXED = Fallback("model-not-indexed", "the index knows no stream of the model")
UNKNOWN_REPLICA = Fallback("unknown-replica", "the index names only unknown replicas")
INDEX_ERROR = Fallback("index-error", "the index failed in an unexpected way")
TOKENS_ERROR = Fallback("tokens-error", "tokenising failed in an unexpected way")


def untrusted(states: set[str]) -> Fallback:
    """No stream that the index knows of can be trusted now; ``states`` are theirs."""
    return Fallback(
        "index-untrusted", f"no stream in the index can be trusted now ({', '.join(sorted(states))})"
    )


_LOOKUP_FAILURES = {
    "map-missing": "the map is not there yet",
    "map-failed": "the map cannot be read",
    "lookup-timeout": "the index did not answer in time",
    "indexer-answer": "the indexer's answer makes no sense or is an error",
    "indexer-unreachable": "the indexer cannot be reached",
}


def lookup_failed(code: str) -> Fallback:
    """The index gave no answer; ``code`` is of a LookupFailedError. The error's own words go to the log."""
    return Fallback(code, _LOOKUP_FAILURES.get(code, "the index failed"))


_LOCAL_STATES = {
    "loading": "the local tokenizer is being loaded",
    "failed": "the local tokenizer cannot be loaded",
    "unchecked": "the local tokenizer was not compared with an engine yet",
    "differs": "the local tokenizer gives other ids than an engine",
}


def local(state: str) -> Fallback:
    """The local tokenizer cannot be used as it is in ``state``; the engine is asked."""
    return Fallback(f"local-{state}", _LOCAL_STATES[state])


def inexact(code: str) -> Fallback:
    """The local tokenizer is not sure to give what the engine gives; ``code`` is of an InexactError."""
    return Fallback(f"inexact-{code}", f"not sure to be tokenised as the engine does ({code})")
