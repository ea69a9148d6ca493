"""The parts of aiohttp, not promised to anybody, that this router stands on.

Its server and its answers go past aiohttp's own steps (docs/studies.md says what that saves). A version
that has not got these parts would fail at the first request, or do something else in silence; so they are
looked for at the start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
from aiohttp import http_parser, http_writer, web, web_protocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import DataQueue

from router.errors import SettingsError

_HANDLER = (
    *("_messages", "_waiter", "_parser", "_loop", "_task_handler", "_close", "_force_close", "_upgraded"),
    *("_buffer_paused", "_reading_paused", "_msg_queue_resume_size", "_resume_reading_if_drained"),
    *("_pause_transport_reading", "_pause_reading_for_buffer", "_max_msg_queue_size"),
    *("_keepalive_handle", "_keepalive_timeout", "_next_keepalive_close_time", "_process_keepalive"),
    *("_lingering_time", "_handle_request", "max_field_size", "writing_paused", "log_exception"),
)
_WRITER = ("_headers_buf", "_headers_written", "_write", "_eof", "chunked", "length", "output_size")
_ANSWER = ("_payload_writer", "_keep_alive", "_eof_sent", "_headers", "_status", "_reason")
_REQUEST = ("_message", "_protocol", "_task", "_prepare_hook")

_OTHERS = (
    *("_serialize_headers", "_ErrInfo", "_factory", "_buffer"),
    *("_wrap_create_connection", "_should_close", "_payload"),
)

NAMES = frozenset({*_HANDLER, *_WRITER, *_ANSWER, *_REQUEST, *_OTHERS})
"""All of them, whosever they are."""


def check_aiohttp() -> None:
    """Raises SettingsError where the installed aiohttp lacks one of the parts, or has another one by its
    name.
    """
    missing = list(_missing_names()) or [*_other_calls(), *_other_parsers()]
    if missing:
        raise SettingsError(
            f"aiohttp {aiohttp.__version__} is not one that this router runs with: it lacks "
            f"{', '.join(missing)}; install aiohttp>=3.14.4, or where it is newer the last 3.14"
        )


def _missing_names() -> Iterator[str]:
    # Of the others, attributes are slots or defaults of the class; these are made with the object.
    writer, answer = http_writer.StreamWriter(None, None), web.StreamResponse()  # type: ignore[arg-type]
    for owner, names in (
        (web.RequestHandler, _HANDLER),
        (writer, _WRITER),
        (answer, _ANSWER),
        (web.BaseRequest, ("_prepare_hook",)),
        (aiohttp.TCPConnector, ("_wrap_create_connection",)),
        (http_writer, ("_serialize_headers",)),
        (web_protocol, ("_ErrInfo", "ERROR")),
    ):
        kind = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
        yield from (f"{kind.__name__}.{name}" for name in names if not hasattr(owner, name))
    # These are not made without a connection or a loop: what they keep is what their code names.
    for made, kept in (
        (web.BaseRequest, ("_message", "_protocol", "_task")),
        (aiohttp.BaseConnector, ("_factory",)),
        (DataQueue, ("_buffer",)),
    ):
        named = made.__init__.__code__.co_names
        yield from (f"{made.__name__}.{name}" for name in kept if name not in named)


def _other_calls() -> Iterator[str]:
    """What takes other arguments than those that we give, or get."""
    calls: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (web.RequestHandler._handle_request, ("request", "start_time", "request_handler")),
        (web.RequestHandler.finish_response, ("request", "resp", "start_time")),
        (web.RequestHandler.handle_error, ("request", "status", "exc", "message")),
        (web.RequestHandler.resume_reading, ("resume_parser",)),
        (web.Request.__init__, ("message", "payload", "protocol", "payload_writer", "task", "loop")),
    )
    for call, names in calls:
        given = tuple(inspect.signature(call).parameters)[1:]
        if given[: len(names)] != names:
            yield f"{call.__qualname__}({', '.join(names)})"


def _other_parsers() -> Iterator[str]:
    """Parsers that do not take heads alone, one behind the other, as aiohttp's own in C do. Those in Python,
    which it falls back on where these cannot be loaded, do not.
    """
    request = b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 9\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    for made, head in (http_parser.HttpRequestParser, request), (http_parser.HttpResponseParser, answer):
        try:
            parser = made(None, None, 2**16, response_with_body=False, read_until_eof=True)
            if [len(parser.feed_data(head)[0]) for _ in range(2)] == [1, 1]:
                continue
        except (AssertionError, AttributeError, TypeError, HttpProcessingError):
            pass
        yield f"{made.__name__} in C, for heads alone"
