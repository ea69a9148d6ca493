"""Lines of a stream, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from router.lines import MOST_HELD_BYTES, WholeLines

STREAMS = st.text("ab:\r\n", max_size=40).map(str.encode)
SIZES = st.lists(st.integers(1, 9), min_size=1)


def cut(content: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        size = sizes.pop(0) if sizes else 7
        yield content[at : at + size]
        at += size


@given(STREAMS, SIZES)
def test_however_a_stream_is_cut_its_lines_pass_as_soon_as_they_are_whole(
    content: bytes, sizes: list[int]
) -> None:
    lines, seen, passed = WholeLines(), b"", b""
    for chunk in cut(content, sizes):
        seen += chunk
        passed += lines.feed(chunk)
        assert passed == seen[: max(seen.rfind(b"\n"), seen.rfind(b"\r")) + 1]
    assert passed + lines.end() == content


def test_px07_of_a_stream_that_breaks_off_no_half_line_is_left() -> None:
    lines = WholeLines()
    assert lines.feed(b"data: {}\n\ndata: {") == b"data: {}\n\n"
    assert lines.feed(b"1") == b""
    assert lines.end(is_whole=False) == b""


def test_an_endless_line_is_not_held_for_ever() -> None:
    lines = WholeLines()
    chunks = [b"a" * 100_000] * 5
    passed = [lines.feed(chunk) for chunk in chunks]
    assert [len(each) for each in passed] == [0, 0, 300_000, 0, 0]
    assert MOST_HELD_BYTES < 300_000
    assert b"".join(passed) + lines.end() == b"".join(chunks)
