"""What makes tokens of prompts, begun and ended with the router."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec

import aiohttp

from router.errors import SettingsError
from router.fleet import Fleet
from router.local_tokens import LocalTokens
from router.metrics import RouterMetrics
from router.settings import RouterSettings, parse_tokenizers
from router.token_cache import TokenCache
from router.token_check import TokenCheck
from router.tokens import Tokenizer


def check_tokenizers(lines: Sequence[str]) -> None:
    """Raises SettingsError where local tokenizers are configured and what they need is not installed."""
    missing = [name for name in ("tokenizers", "jinja2") if lines and find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"--tokenizer needs {' and '.join(missing)}: install the extra, warmroute[local-tokenizer]"
        )


@asynccontextmanager
async def tokenizing(
    settings: RouterSettings,
    fleet: Fleet,
    metrics: RouterMetrics,
    session: aiohttp.ClientSession,
    rng: random.Random,
) -> AsyncIterator[tuple[Tokenizer, TokenCheck]]:
    """What makes tokens, and what watches that they are the engines'."""
    timeout_s, cache = settings.tokenize_timeout_s, TokenCache(settings.token_cache_tokens)
    sources = parse_tokenizers(settings.tokenizer)
    local = LocalTokens(sources, cache, threads=settings.tokenizer_threads, timeout_s=timeout_s)
    tokenizer = Tokenizer(session, timeout_s=timeout_s, cache=cache, local=local, rng=rng)
    interval_s = settings.tokenizer_check_interval_s
    check = TokenCheck(fleet, local, cache, metrics, tokenizer.ask, interval_s=interval_s)
    fleet.changed, local.changed = check.noticed, check.wake
    local.start()
    check.start()
    try:
        yield tokenizer, check
    finally:
        await check.close()
        local.close()
