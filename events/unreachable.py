"""Why a server could not be asked, in words for people."""

from __future__ import annotations

import os

import aiohttp


def why(error: BaseException) -> str:
    """The system's own words where a connection could not be made, without aiohttp's around them; else what
    the error says, or its kind where it says nothing.
    """
    if isinstance(error, aiohttp.ClientSSLError):
        return f"TLS: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        known = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror
        return known or str(cause) or type(cause).__name__
    return str(error) or type(error).__name__
