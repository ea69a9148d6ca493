"""Whether local tokenizers still give the engines' ids: a few probes are compared, at the start, when an
engine came back, and now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from events.logs import Throttled
from router import fallback
from router.conversation import ContentFormat
from router.fallback import Fallback
from router.fleet import Fleet
from router.local_tokens import FORMATS, LocalTokens, Told
from router.metrics import RouterMetrics
from router.prompt import RequestBody, read_body
from router.replicas import Health, Replica, StreamId
from router.threads import ThreadsBusyError
from router.token_cache import TokenCache
from router.tokens import tokenize_request

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""When engines that could not be asked, and no other has answered for them, are asked again."""
UNASKED_S = 30.0
"""When those are that others have answered for: one that is too busy may be the one that differs."""

_TEXT = (
    "Grüße, 你好 \U0001f469\u200d\U0001f467 e\u0301 12345 \t\n\n  a_b(c) {}\u00a0 don't IT'S getElementById"
    " toString \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    " \u201cHello\u201d\u3002A\u80a1 \ufb01 in   2024;\n*/\n//\n\n\t\n"
)
"""What tokenizers split in different ways, in words that they have as one token: contractions, capitals in
words, vowel signs, Chinese with Latin letters, marks with line ends, blanks in front of numbers. Where tokens
are shorter, another way to split makes the same ids: 19 of 73 real ones went unseen with less.
"""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": _TEXT,
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "number"}}},
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"z": "ä", "a": 1.5}'},
}
_USER = {"role": "user", "content": _TEXT}
_PARTS = [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]
PROBES: tuple[dict[str, object], ...] = (
    {"prompt": _TEXT},
    {"prompt": _TEXT, "add_special_tokens": False},
    {"messages": [{"role": "system", "content": "  Be brief. "}, _USER]},
    {"messages": [{"role": "user", "content": _PARTS}]},
    {"messages": [_USER, {"role": "assistant", "content": "\n\nyes "}, _USER], "tools": [_TOOL]},
    {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": _PARTS},
        ],
        "tools": [_TOOL],
    },
    {
        "messages": [_USER, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
)

_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77SAA6VEE"
    "AoFAIBAIBAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII="
)
"""64 x 64 pixels, grey."""
_SEEN = [{"type": "text", "text": _TEXT}, {"type": "image_url", "image_url": {"url": _IMAGE}}]
MEDIA_PROBE: dict[str, object] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _SEEN}]
}

AskEngine = Callable[[Replica, bytes], Awaitable["array[int] | Fallback"]]
Made = dict[ContentFormat, "array[int]"]


class Compared(msgspec.Struct, frozen=True):
    """One engine against the local tokenizer: the ways to give content that agree in all of ``probes``, those
    that both sides could tokenise.
    """

    agreeing: frozenset[ContentFormat]
    probes: int


def compare(made: Sequence[Made], answered: Sequence[array[int] | None]) -> Compared:
    """``made`` here, for each probe by the way to give content; ``answered`` there, None where refused."""
    both = [
        (ours, theirs) for ours, theirs in zip(made, answered, strict=True) if ours and theirs is not None
    ]
    agreeing = [form for form in FORMATS if all(ours.get(form) == theirs for ours, theirs in both)]
    return Compared(frozenset(agreeing), len(both))


def compare_media(made: Made, answered: Sequence[array[int]]) -> set[ContentFormat] | None:
    """The ways to give content with which ``made``, the ids in front of an image, are what all of
    ``answered`` begin with; None without answers.
    """
    if not answered:
        return None
    return {form for form, ids in made.items() if all(theirs[: len(ids)] == ids for theirs in answered)}


class TokenCheck:
    """The task that compares. ``ask`` asks an engine's ``/tokenize``."""

    def __init__(
        self,
        fleet: Fleet,
        local: LocalTokens,
        cache: TokenCache,
        metrics: RouterMetrics,
        ask: AskEngine,
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._local = local
        self._cache = cache
        self._metrics = metrics
        self._ask = ask
        self._interval_s = interval_s
        self._clock = clock
        self._up: set[tuple[str, str | None]] = set()
        self._unasked: set[str] = set()
        self._woken = asyncio.Event()
        self._throttled = Throttled(log, clock)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="token check")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def noticed(self) -> None:
        """Something changed in the fleet. What is known of the models of an engine that came up is doubted at
        once, and again when it says what its model is: it may have come with another tokenizer.
        """
        up = {
            (name, replica.models.model if replica.models else None)
            for name, replica in self._fleet.replicas.items()
            if replica.health is Health.UP
        }
        for name, _ in up - self._up:
            self._doubt(self._fleet.replicas[name])
        self._up = up
        self.wake()

    def restarted(self, stream: StreamId) -> None:
        """The stream's engine is another process, though it was never seen to be away."""
        replica = self._fleet.replicas.get(stream[0])
        if replica is not None:
            self._doubt(replica)
            self.wake()

    def told(self) -> list[Told]:
        """The local tokenizers, for people."""
        return self._local.told()

    def wake(self) -> None:
        """Compares what was not compared yet."""
        self._woken.set()

    def _doubt(self, replica: Replica) -> None:
        for model in self._local.models():
            if replica.models is None or replica.resolve(model) is not None:
                self._local.doubt(model)
        if replica.models is not None:
            self._cache.forget(replica.models.model)

    async def _run(self) -> None:
        all_at = self._clock()
        while True:
            self._woken.clear()
            everything = self._clock() >= all_at
            if everything:
                all_at = self._clock() + self._interval_s
            for model in self._local.models():
                if everything or self._local.state(model) == "unchecked" or model in self._unasked:
                    await self._check_safely(model)
            unsure = any(self._local.state(model) == "unchecked" for model in self._local.models())
            soon_s = RETRY_S if unsure else UNASKED_S if self._unasked else self._interval_s
            await self._pause(min(soon_s, max(0.0, all_at - self._clock())))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _check_safely(self, model: str) -> None:
        try:
            await self.check(model)
        except Exception:
            # Without this task a tokenizer that is not trusted would never be again.
            log.exception("comparing the tokenizer of model %s with its engines failed", model)

    async def check(self, model: str) -> None:
        """Compares the model's local tokenizer with every engine that serves it now."""
        if self._local.state(model) in (None, "loading", "failed"):
            return
        replicas = [r for r in self._fleet.usable() if r.resolve(model) is not None]
        bodies = [read_body(msgspec.json.encode({"model": model, **probe})) for probe in PROBES]
        media_body = read_body(msgspec.json.encode({"model": model, **MEDIA_PROBE}))
        try:
            made = [await self._local.made(model, body) for body in bodies]
            made_media = await self._local.made_before_media(model, media_body)
        except (ThreadsBusyError, TimeoutError):
            self._metrics.tokenizer_checks.labels(model, "not-made").inc()
            return
        answers = await asyncio.gather(*(self._answers(replica, bodies) for replica in replicas))
        media = compare_media(made_media, await self._media_answers(media_body, replicas))
        self._unasked.discard(model)
        agreeing: set[ContentFormat] = set(FORMATS)
        compared = 0
        for replica, answered in zip(replicas, answers, strict=True):
            if isinstance(answered, Fallback):
                if answered is not fallback.TOKENIZE_MISSING:
                    self._unasked.add(model)
                self._metrics.tokenizer_checks.labels(model, "not-asked").inc()
                continue
            result = compare(made, answered)
            if not result.probes:
                self._metrics.tokenizer_checks.labels(model, "nothing-to-compare").inc()
                continue
            compared += 1
            agreeing &= result.agreeing
            self._say(model, replica, result)
        if compared:
            self._local.judge(model, agreeing, media)
            self._say_media(model)
        elif replicas and all(answer is fallback.TOKENIZE_MISSING for answer in answers):
            self._local.unverifiable(model)

    def _say(self, model: str, replica: Replica, result: Compared) -> None:
        self._metrics.tokenizer_checks.labels(model, "agrees" if result.agreeing else "differs").inc()
        if not result.agreeing:
            self._throttled.warning(
                f"{model} {replica.name}",
                "the local tokenizer of model %s gives other ids than replica %s: it is not used until they"
                " agree; give the engine's own files to --tokenizer, chat template included",
                model,
                replica.name,
            )

    def _say_media(self, model: str) -> None:
        told = next(told for told in self._local.told() if told.model == model)
        if told.media_agrees is None:
            return
        self._metrics.tokenizer_checks.labels(
            model, "media-agrees" if told.media_agrees else "media-differs"
        ).inc()
        if told.state == "agrees" and not told.media_agrees:
            self._throttled.warning(
                f"{model} media",
                "in front of an image the local tokenizer of model %s gives other ids than its engines:"
                " chats with images are routed by load",
                model,
            )

    async def _media_answers(self, body: RequestBody, replicas: Sequence[Replica]) -> list[array[int]]:
        """The ids of those engines that take images."""
        asked = tokenize_request(body)
        assert asked is not None, "probes can be asked"
        answers = await asyncio.gather(*(self._ask(replica, asked[0]) for replica in replicas))
        return [answer for answer in answers if not isinstance(answer, Fallback)]

    async def _answers(
        self, replica: Replica, bodies: Sequence[RequestBody]
    ) -> list[array[int] | None] | Fallback:
        """The engine's ids of each body, None for one that it refuses; why not, where it cannot be asked."""
        answers: list[array[int] | None] = []
        for body in bodies:
            asked = tokenize_request(body)
            assert asked is not None, "probes can be asked"
            answer = await self._ask(replica, asked[0])
            if isinstance(answer, Fallback):
                if answer is not fallback.TOKENIZE_REFUSED:
                    return answer
                answers.append(None)
            else:
                answers.append(answer)
        return answers
