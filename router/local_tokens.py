"""Tokens from local tokenizers: loaded in the background, used in threads, trusted while engines agree.

A model's tokenizer is one of these: ``loading``; ``failed`` (tried again after a while); ``unchecked``, as
no engine was asked yet; ``agrees`` with the engines; ``differs`` from one; ``unverifiable``, as no engine
has ``/tokenize``. Only one that agrees, or that cannot be verified, is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from events.logs import Throttled
from router import fallback
from router.conversation import ContentFormat, InexactError, knows_tools, read_chat, read_media_chat
from router.fallback import Fallback
from router.local_tokenizer import LocalTokenizer, TokenizerLoadError, load_converted, load_tokenizer
from router.prompt import RequestBody, given, plain
from router.threads import Threads, ThreadsBusyError
from router.token_cache import TokenCache

log = logging.getLogger(__name__)

RELOAD_AFTER_S = 300.0
"""How long a tokenizer that could not be loaded is not tried again."""
WAITING_PER_THREAD = 16
AT_ONCE_BYTES, AT_ONCE_MESSAGES, AT_ONCE_TOOLS_BYTES = 256 * 1024, 64, 16 * 1024
"""What is read and put into its template on the loop, within a millisecond. That is Python, which a thread
would do no sooner, and not beside the loop.
"""
AT_ONCE_VALUES = 2048
"""Values in it: each costs Python a step, or ten. A text is one, however long; 20 kB of JSON have as many."""
AT_ONCE_PLACES = 2048
"""Where special tokens may begin in what comes of it: each is looked at."""
AT_ONCE_CHARS = 512
"""New text that is tokenised on the loop too, in about the time that it takes a thread to begin."""
TRUSTED = ("agrees", "unverifiable")

State = Literal["loading", "failed", "unchecked", "agrees", "differs", "unverifiable"]
Work = Callable[[LocalTokenizer, RequestBody, ContentFormat], "array[int]"]
Ids = Awaitable["array[int]"]
Loader = Callable[[str, str, TokenCache], LocalTokenizer]
FORMATS: tuple[ContentFormat, ...] = ("string", "openai")


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A local tokenizer as ``/debug/tokenizers`` shows it.

    ``read_by``: by the router, from its files, or by ``transformers``. ``media_agrees``: engines have what it
    says in front of an image; None where none took one.
    """

    model: str
    source: str
    state: State
    error: str | None
    read_by: Literal["router", "transformers"] | None
    content_format: ContentFormat | None
    cuts_texts: bool | None
    media_agrees: bool | None


class _Local:
    """One model's tokenizer. Changed on the loop only."""

    def __init__(self, model: str, source: str) -> None:
        self.model = model
        self.source = source
        self.state: State = "loading"
        self.error: str | None = None
        self.tokenizer: LocalTokenizer | None = None
        self.content_format: ContentFormat | None = None
        self.media_agrees: bool | None = None
        self.reload_at = float("-inf")
        self.load: asyncio.Future[LocalTokenizer] | None = None
        self.loads = 0

    def told(self) -> Told:
        return Told(
            model=self.model,
            source=self.source,
            state=self.state,
            error=self.error,
            read_by=self._read_by(),
            content_format=self.content_format,
            cuts_texts=self.tokenizer.cuts_texts if self.tokenizer else None,
            media_agrees=self.media_agrees,
        )

    def _read_by(self) -> Literal["router", "transformers"] | None:
        if self.tokenizer is None:
            return None
        return "router" if self.tokenizer.is_plain else "transformers"


class LocalTokens:
    """The local tokenizers, by model. ``sources`` are folders or names on the hub.

    ``changed`` is called when one was loaded, or could not be. Where engines differ from one that ``load``
    read from its files alone, ``convert`` gets a try: it reads them by the library that engines use.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        cache: TokenCache,
        *,
        threads: int,
        timeout_s: float,
        load: Loader = load_tokenizer,
        convert: Loader = load_converted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._locals = {model: _Local(model, source) for model, source in sources.items()}
        self._cache = cache
        self._timeout_s = timeout_s
        self._load = load
        self._convert = convert
        self._clock = clock
        self._throttled = Throttled(log, clock)
        # A load may hang on the network for good, so each has a thread of its own and none is behind another.
        self._loaders = Threads("tokenizer-load", len(self._locals), len(self._locals))
        self._threads = Threads("tokenize", threads, threads * WAITING_PER_THREAD)
        self.changed: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begins to load all of them."""
        for local in self._locals.values():
            self._begin_load(local)

    def close(self) -> None:
        self._loaders.close()
        self._threads.close()

    def models(self) -> Collection[str]:
        """The models that have a local tokenizer."""
        return self._locals.keys()

    def told(self) -> list[Told]:
        """All of them, for people."""
        return [local.told() for local in self._locals.values()]

    def state(self, model: str) -> State | None:
        """None for a model without a local tokenizer."""
        return local.state if (local := self._locals.get(model)) else None

    async def tokens(self, model: str, body: RequestBody) -> array[int] | Fallback:
        """The ids of a request's text or chat, or why they cannot be told here."""
        return await self._try(model, body, self._tokens)

    async def tokens_before_media(self, model: str, body: RequestBody) -> array[int] | Fallback:
        """The ids of a chat in front of its first image, or why they cannot be told here."""
        if self._locals[model].media_agrees is False:
            return fallback.inexact("media-differs")
        return await self._try(model, body, self._tokens_before_media)

    def _tokens(self, local: _Local, body: RequestBody, form: ContentFormat) -> Ids:
        """Begun on the loop, where that is quick, and ended there where next to nothing is new."""
        if not _is_quickly_rendered(body):
            return self._in_thread(local, body, form, _tokens)
        assert local.tokenizer is not None
        text, add_special_tokens = _text(local.tokenizer, body, form)
        if local.tokenizer.places(text) > AT_ONCE_PLACES:
            return self._done_in_thread(partial(local.tokenizer.encode, text, add_special_tokens))
        begun = local.tokenizer.begin(text, add_special_tokens)
        if begun.new_chars > AT_ONCE_CHARS:
            return self._done_in_thread(begun.ids)
        return _at_once(begun.ids())

    def _tokens_before_media(self, local: _Local, body: RequestBody, form: ContentFormat) -> Ids:
        return self._in_thread(local, body, form, _tokens_before_media)

    async def _try(
        self, model: str, body: RequestBody, work: Callable[[_Local, RequestBody, ContentFormat], Ids]
    ) -> array[int] | Fallback:
        local = self._locals[model]
        self._begin_load(local)
        if local.state not in TRUSTED:
            return fallback.local(local.state)
        try:
            return await work(local, body, local.content_format or "string")
        except InexactError as error:
            return fallback.inexact(error.code)
        except ThreadsBusyError:
            return fallback.TOKENIZE_BUSY
        except TimeoutError:
            return fallback.TOKENIZE_TIMEOUT
        except Exception as error:
            # The engine can still be asked. The message could quote the prompt.
            self._throttled.warning(model, "a local tokenizer failed: %s", type(error).__name__)
            return fallback.inexact("error")

    async def made(self, model: str, body: RequestBody) -> dict[ContentFormat, array[int]]:
        """What the model's tokenizer, trusted or not, makes of a request, by how content is given to the
        template.

        A way that the template refuses is left out. Raises ThreadsBusyError and TimeoutError.
        """
        return await self._make(model, body, _tokens)

    async def made_before_media(self, model: str, body: RequestBody) -> dict[ContentFormat, array[int]]:
        """As ``made``, of a chat with an image: the ids in front of it."""
        return await self._make(model, body, _tokens_before_media)

    async def _make(self, model: str, body: RequestBody, work: Work) -> dict[ContentFormat, array[int]]:
        made: dict[ContentFormat, array[int]] = {}
        for form in FORMATS:
            with contextlib.suppress(InexactError):
                made[form] = await self._in_thread(self._locals[model], body, form, work)
        return made

    def judge(
        self, model: str, agreeing: set[ContentFormat], media: set[ContentFormat] | None = None
    ) -> None:
        """An engine was asked: the ways of giving content with which all ids were the engine's, and those
        with which it had the same in front of an image; None where no engine took one.
        """
        local = self._locals[model]
        if local.tokenizer is None:
            return
        best = local.content_format or local.tokenizer.content_format()
        local.content_format = best if best in agreeing else next(iter(sorted(agreeing)), None)
        local.state = "agrees" if agreeing else "differs"
        local.media_agrees = None if media is None else local.content_format in media
        if not agreeing and local.tokenizer.is_plain:
            self._begin_load(local, again=True)

    def doubt(self, model: str) -> None:
        """The engines may have changed: not to be used before they were asked again."""
        local = self._locals[model]
        if local.state in ("agrees", "differs", "unverifiable"):
            local.state = "unchecked"

    def unverifiable(self, model: str) -> None:
        """No engine of the model can be asked: it is taken at the word of whoever configured it."""
        local = self._locals[model]
        if local.tokenizer is not None and local.state == "unchecked":
            local.content_format = local.content_format or local.tokenizer.content_format()
            local.state = "unverifiable"

    def _in_thread(self, local: _Local, body: RequestBody, form: ContentFormat, work: Work) -> Ids:
        assert local.tokenizer is not None
        return self._done_in_thread(partial(work, local.tokenizer, body, form))

    async def _done_in_thread(self, work: Callable[[], array[int]]) -> array[int]:
        done = self._threads.run(work)
        async with asyncio.timeout(self._timeout_s):
            return await done

    def _begin_load(self, local: _Local, *, again: bool = False) -> None:
        """``again``: by the library that engines use, in place of the one that is there."""
        wanted = again or local.tokenizer is None
        if local.load is not None or not wanted or self._clock() < local.reload_at:
            return
        local.loads += 1
        name = f"{local.model}#{local.loads}"
        load = self._convert if again else self._load
        local.load = self._loaders.run(partial(load, local.source, name, self._cache))
        local.load.add_done_callback(partial(self._end_load, local))

    def _end_load(self, local: _Local, load: asyncio.Future[LocalTokenizer]) -> None:
        local.load = None
        if load.cancelled():
            return
        try:
            local.tokenizer = load.result()
        except TokenizerLoadError as error:
            local.error = str(error)
            if local.tokenizer is None:
                local.state = "failed"
            local.reload_at = self._clock() + RELOAD_AFTER_S
            log.warning(
                "no local tokenizer for model %s, engines are asked; tried again in %g s: %s",
                local.model,
                RELOAD_AFTER_S,
                error,
            )
            self.changed()
            return
        local.state, local.error = "unchecked", None
        log.info("loaded the tokenizer of model %s from %s", local.model, local.source)
        self.changed()


async def _at_once(ids: array[int]) -> array[int]:
    return ids


def _is_quickly_rendered(body: RequestBody) -> bool:
    tools_bytes = len(memoryview(body.tools))
    fields = [field for field in (body.prompt, body.documents, body.chat_template_kwargs) if given(field)]
    size = len(memoryview(body.messages)) + tools_bytes + sum(len(memoryview(field)) for field in fields)
    if size > AT_ONCE_BYTES:
        return False
    if not knows_tools(body):
        if tools_bytes > AT_ONCE_TOOLS_BYTES:
            return False
        fields.append(body.tools)
    said = body.said if given(body.messages) else []
    if len(said) > AT_ONCE_MESSAGES:
        return False
    if size <= AT_ONCE_VALUES:
        return True
    texts = [text for text in map(bytes, fields) if not text.startswith(b'"')]
    return _values(said) + sum(map(_marks, texts)) <= AT_ONCE_VALUES


def _values(said: Any) -> int:
    """How many values are in what was read already, or at least more than ``AT_ONCE_VALUES``; texts of JSON
    that a template gets as values count by their marks. Marks in other texts are none: looking for them would
    take longer than all else that is done with a long prompt.
    """
    count, inside = 0, [said]
    while inside and count <= AT_ONCE_VALUES:
        value = inside.pop()
        count += len(value)
        if isinstance(value, dict):
            if isinstance(arguments := value.get("arguments"), str):
                count += _marks(arguments.encode("utf-8", "surrogatepass"))
            value = value.values()
        inside += [each for each in value if isinstance(each, dict | list)]
    return count


def _marks(text: bytes) -> int:
    """At least as many as there are values in a text of JSON, but for one."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _tokens(tokenizer: LocalTokenizer, body: RequestBody, form: ContentFormat) -> array[int]:
    """In a thread: the ids of a chat or of the first text. Raises InexactError."""
    return tokenizer.encode(*_text(tokenizer, body, form))


def _text(tokenizer: LocalTokenizer, body: RequestBody, form: ContentFormat) -> tuple[str, bool]:
    """The text of a chat, or the first one, and whether special tokens are added. Raises InexactError."""
    if given(body.messages):
        chat = read_chat(body, form)
        return tokenizer.render(chat), chat.add_special_tokens
    try:
        prompt = msgspec.json.decode(body.prompt, type=str | list[str])
    except msgspec.MsgspecError as error:
        raise InexactError("prompt") from error
    add = plain(body.add_special_tokens) if given(body.add_special_tokens) else True
    if not isinstance(add, bool):
        raise InexactError("flag")
    return prompt if isinstance(prompt, str) else prompt[0], add


def _tokens_before_media(tokenizer: LocalTokenizer, body: RequestBody, form: ContentFormat) -> array[int]:
    """In a thread: the ids of a chat up to its first image. Raises InexactError."""
    return tokenizer.encode_before_media(*read_media_chat(body, form))
