"""Errors that we answer ourselves, in OpenAI's shape as vLLM fills it
(``entrypoints/serve/engine/protocol.py`` 0.32).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from router.decision import HEADER_PREFIX, header_value
from router.errors import RefusedError


def error_object(status: int, kind: str, message: str, param: str | None = None) -> dict[str, object]:
    """``{"error": {...}}``."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refusal(error: RefusedError, policy: str, headers: Mapping[str, str]) -> web.Response:
    """The answer for a request that we refuse.

    ``headers`` are of the decision and the request, where there are any.
    """
    said = {HEADER_PREFIX + "policy": policy, **headers, HEADER_PREFIX + "reason": header_value(error.reason)}
    if error.retry_after is not None:
        said["Retry-After"] = str(error.retry_after)
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error_object(error.status, error.kind, str(error), error.param)),
        content_type="application/json",
        headers=said,
    )


def terminal_event(message: str, last_bytes: bytes) -> bytes:
    """The SSE event that ends a stream whose replica died.

    It starts a line of its own, whatever came last.
    """
    gap = b"" if not last_bytes or last_bytes.endswith(b"\n\n") else b"\n\n"
    return gap + b"data: " + msgspec.json.encode(error_object(502, "BadGatewayError", message)) + b"\n\n"
