from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import keys as block_keys
from indexer.keys import keys_behind, prompt_extras, root_key
from router.key_cache import SEGMENT_TOKENS, SHORT_TOKENS, KeyCache

PROMPT = array("I", range(5 * SEGMENT_TOKENS + 100))


def asked(
    tokens: array[int],
    *,
    model: str,
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    additional_salt: str | None = None,
    epoch: int = 0,
) -> tuple[bytes, array[int], int, list[bytes]]:
    """All that the keys of a prompt depend on."""
    root = root_key(model, lora_name, block_size, additional_salt, epoch)
    return root, tokens, block_size, prompt_extras(cache_salt)


def keys_of(cache: KeyCache, tokens: array[int], **what: Any) -> list[bytes]:
    keys = cache.of(tokens, what.get("lora_name"), what.get("cache_salt"))(*asked(tokens, **what))
    made = list(keys)
    assert [keys[number] for number in range(-len(made), len(made))] == made * 2
    assert (len(keys), keys[2:5], keys[:-1]) == (len(made), made[2:5], made[:-1])
    for beyond in (len(made), -len(made) - 1):
        with pytest.raises(IndexError):
            keys[beyond]
    return made


def known(cache: KeyCache, tokens: array[int], lora_name: str | None = None, salt: str | None = None) -> int:
    return cache.of(tokens, lora_name, salt).known_tokens


def tokens_of(ends: list[tuple[int, int]]) -> array[int]:
    """A prompt that goes through runs of equal tokens, so that prompts have prefixes in common."""
    ids = array("I")
    for token, length in ends:
        ids.extend([token] * length)
    return ids


PROMPTS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([1, 15, 16, 256, 1008, 1024, 2048])), max_size=5
).map(tokens_of)
QUERIES = st.lists(
    st.tuples(
        PROMPTS,
        st.fixed_dictionaries(
            {
                "model": st.sampled_from(["a", "b"]),
                "block_size": st.sampled_from([1, 16, 32, 48, 512, 528, 1024, 2048]),
                "lora_name": st.sampled_from([None, "", "l", "k"]),
                "cache_salt": st.sampled_from([None, "", "l", "s"]),
                "additional_salt": st.sampled_from([None, "", "t"]),
                "epoch": st.sampled_from([0, 3]),
            }
        ),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(queries=QUERIES, size=st.sampled_from([0, 100, 300, 100_000]))
def test_cached_keys_are_the_keys(queries: list[tuple[array[int], dict[str, Any]]], size: int) -> None:
    cache = KeyCache(size)
    for tokens, what in queries:
        assert keys_of(cache, tokens, **what) == keys_behind(*asked(tokens, **what))


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"lora_name": "l"},
        {"cache_salt": "s"},
        {"block_size": 32},
        {"additional_salt": "t"},
        {"epoch": 1},
    ],
)
def test_keys_of_another_model_adapter_salt_or_block_size_are_others(other: dict[str, Any]) -> None:
    cache = KeyCache(100_000)
    plain: dict[str, Any] = {"model": "m", "block_size": 16}
    mine = keys_of(cache, PROMPT, **plain)
    theirs = keys_of(cache, PROMPT, **plain | other)
    assert not set(mine) & set(theirs)
    assert theirs == keys_behind(*asked(PROMPT, **plain | other))


def test_only_what_is_new_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeyCache(100_000)
    keys_of(cache, PROMPT, model="m", block_size=16)
    hashed: list[int] = []
    real = block_keys.local_hashes

    def counted(tokens: array[int], block_size: int) -> list[bytes]:
        hashed.append(len(tokens) // block_size)
        return real(tokens, block_size)

    monkeypatch.setattr(block_keys, "local_hashes", counted)
    assert known(cache, PROMPT) == 5 * SEGMENT_TOKENS
    assert known(cache, PROMPT, "l") == known(cache, PROMPT, None, "s") == 0
    keys_of(cache, PROMPT + array("I", [7] * 200), model="m", block_size=16)
    assert hashed == [SHORT_TOKENS // 16, 44 // 16]
    hashed.clear()
    keys_of(cache, PROMPT + array("I", [7] * 200), model="m", block_size=16)
    assert hashed == [44 // 16]


def test_the_cache_is_bounded_by_its_blocks() -> None:
    cache = KeyCache(1000)
    for number in range(100):
        keys_of(cache, array("I", [number] * 3 * SEGMENT_TOKENS), model="m", block_size=16)
    kept = sum(known(cache, array("I", [number] * 3 * SEGMENT_TOKENS)) for number in range(100))
    assert SEGMENT_TOKENS <= kept <= 1000 * 16
