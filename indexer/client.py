"""Asks an indexer over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw

from events.unreachable import why
from indexer.errors import IndexerAnswerError, IndexerUnreachableError
from indexer.outcome import Outcome
from indexer.reader import Matched
from indexer.registration import Registration


class _Answer(msgspec.Struct):
    streams: list[Matched]


class _Refusal(msgspec.Struct):
    error: str


_NO_SUCH_PATH = "Not Found: "


class IndexerClient:
    """One indexer, by its URL. Every method raises IndexerUnreachableError or IndexerAnswerError."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout_s: float = 1.0) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def register(self, registration: Registration) -> None:
        """Has a stream followed."""
        await self._call("POST", "/register", registration)

    async def unregister(self, instance_id: str, model_name: str) -> None:
        """Has an instance forgotten."""
        await self._call("POST", "/unregister", {"instance_id": instance_id, "model_name": model_name})

    async def workers(self) -> list[dict[str, Any]]:
        """What is registered, as ``GET /workers`` has it."""
        body = await self._call("GET", "/workers", None)
        workers: list[dict[str, Any]] = self._decode(body, list[dict[str, Any]])
        return workers

    async def query(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Matched]:
        """What each stream of ``model`` holds of a prompt; empty when the model is not registered."""
        query = {
            "model_name": model,
            "token_ids": list(tokens),
            "lora_name": lora_name,
            "cache_salt": cache_salt,
        }
        try:
            body = await self._call("POST", "/query", query)
        except IndexerAnswerError as error:
            if error.unknown:
                return []
            raise
        answer: _Answer = self._decode(body, _Answer)
        return answer.streams

    async def feedback(
        self,
        instance_id: str,
        model: str,
        tokens: Sequence[int],
        *,
        generation: int,
        sequence: int | None,
        cached_tokens: int,
        predicted_tokens: int | None = None,
        rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> Outcome:
        """Tells what an engine had cached of a prompt; ``generation`` and ``sequence`` are as it was chosen.

        Not for answers that say nothing about the cache: ``prompt_logprobs``, ``n`` above 1, cut off.
        """
        told = {
            "instance_id": instance_id,
            "dp_rank": rank,
            "model_name": model,
            "generation": generation,
            "sequence": sequence,
            "token_ids": list(tokens),
            "lora_name": lora_name,
            "cache_salt": cache_salt,
            "cached_tokens": cached_tokens,
            "predicted_tokens": predicted_tokens,
        }
        outcome: Outcome = self._decode(await self._call("POST", "/feedback", told), Outcome)
        return outcome

    async def feedback_all(self, told: bytes, count: int) -> list[Outcome]:
        """Tells of ``count`` answers at once: a JSON list of Told. What came of each, in their order."""
        outcomes: list[Outcome] = self._decode(
            await self._call("POST", "/feedback", Raw(told)), list[Outcome]
        )
        if len(outcomes) != count:
            raise IndexerAnswerError(f"{self.url} took {len(outcomes)} of {count} answers", 200)
        return outcomes

    def _decode(self, body: bytes, shape: Any) -> Any:
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.DecodeError as error:
            raise IndexerAnswerError(f"{self.url} answered what no indexer answers: {error}", 200) from error

    async def _call(self, method: str, path: str, body: Any) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=self._timeout
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise IndexerUnreachableError(
                f"no answer from the indexer at {self.url}: {why(error)}"
            ) from error
        if response.status >= 400:
            text = answer[:200].decode("utf-8", "replace")
            raise IndexerAnswerError(
                f"{method} {self.url}{path}: {response.status} {text}",
                response.status,
                unknown=response.status == 404 and _names_something(answer),
            )
        return answer


def _names_something(answer: bytes) -> bool:
    """Whether a 404 is an indexer's word on what was asked for, and not a server's without such a path."""
    try:
        return not msgspec.json.decode(answer, type=_Refusal).error.startswith(_NO_SUCH_PATH)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
