from __future__ import annotations

import socket

import aiohttp
import pytest

from events.unreachable import why


async def failure(url: str) -> BaseException:
    with pytest.raises((aiohttp.ClientError, OSError)) as caught:
        async with aiohttp.ClientSession() as session, session.get(url):
            pass
    return caught.value


async def test_a_connection_that_is_refused_is_told_in_the_systems_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert why(await failure(f"http://127.0.0.1:{port}")) == "Connection refused"


async def test_a_name_that_is_none_is_told_without_what_the_client_library_adds() -> None:
    said = why(await failure("http://nobody.invalid"))
    assert said
    assert "ssl:" not in said


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert (why(TimeoutError()), why(OSError("no room"))) == ("TimeoutError", "no room")
