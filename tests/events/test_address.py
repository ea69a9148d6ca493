"""Addresses to listen on, and how they are shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.address import host_and_port, http_url, not_only


@pytest.mark.parametrize(
    ("listen", "parts"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("indexer.example:65535", ("indexer.example", 65535)),
        ("[::1]:8080", ("::1", 8080)),
        ("[::]:9400", ("::", 9400)),
    ],
)
def test_an_address_is_a_host_and_a_port(listen: str, parts: tuple[str, int]) -> None:
    assert host_and_port(listen) == parts


@pytest.mark.parametrize(
    "listen",
    ["", ":", "8080", ":8080", "[]:8080", "localhost", "localhost:", "localhost:http", "localhost:65536",
     "localhost:-1", "localhost:+1", "localhost: 1", "localhost:1.5", "http://localhost:80/"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_what_to_write(listen: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT") as caught:
        host_and_port(listen)
    assert repr(listen) in str(caught.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("indexer", "http://indexer:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://127.0.0.1:80"),
        ("*", "http://127.0.0.1:80"),
    ],
)
def test_the_url_is_one_that_can_be_opened_and_what_is_open_to_others_says_so(host: str, url: str) -> None:
    assert http_url(host, 80) == url
    assert bool(not_only(host)) == (host in ("0.0.0.0", "::", "*"))


@given(st.ip_addresses(), st.integers(0, 65535))
@settings(deadline=None)
def test_every_ip_address_is_read_as_it_is_written(address: object, port: int) -> None:
    host = str(address)
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert host_and_port(listen) == (host, port)
