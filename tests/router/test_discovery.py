from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.discovery import Discovery, DNSSource, FileSource, addresses_of
from router.errors import SettingsError
from router.kubernetes import KubernetesSource
from router.replicas import ReplicaSpec, parse_replica
from router.watched import WatchedFile


def write(path: Path, text: str, at: int) -> None:
    """Writes a file whose time is ``at``: nothing here may depend on how fast the test runs."""
    path.write_text(text)
    os.utime(path, ns=(at, at))


def test_a_file_is_another_one_when_it_has_been_so_for_one_look(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, "a", 1)
    watched = WatchedFile(path)
    assert [watched.changed(), watched.changed()] == [False, False]
    write(path, "b", 2)
    assert watched.changed() is False
    write(path, "c", 3)
    assert [watched.changed(), watched.changed(), watched.changed()] == [False, True, False]


def test_a_file_that_is_gone_or_the_same_again_has_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, "a", 1)
    watched = WatchedFile(path)
    path.rename(tmp_path / "g")
    assert [watched.changed(), watched.changed()] == [False, False]
    (tmp_path / "g").rename(path)
    assert [watched.changed(), watched.changed()] == [False, False]


def test_a_link_that_points_elsewhere_is_another_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, "a", 1)
    link = tmp_path / "link"
    link.symlink_to("one")
    watched = WatchedFile(link)
    link.unlink()
    link.symlink_to("two")
    assert [watched.changed(), watched.changed()] == [False, True]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("replicas", "# ours\na=http://h:1\n\n  b=http://h:2,ranks=2\n"),
        ("replicas.toml", 'replica = ["a=http://h:1", "b=http://h:2,ranks=2"]'),
    ],
)
async def test_a_file_names_replicas_in_lines_or_as_toml(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path / name, text, 1)
    found = await FileSource(tmp_path / name).read()
    assert found == (parse_replica("a=http://h:1"), parse_replica("b=http://h:2,ranks=2"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("replicas", "nonsense"),
        ("replicas", "a=http://h:1\na=http://h:2"),
        ("replicas", ""),
        ("replicas", "# nothing\n"),
        ("r.toml", "replica = ["),
        ("r.toml", "replicas = []"),
        ("r.toml", "replica = [1]"),
        ("replicas", "\udcff"),
    ],
)
async def test_a_file_that_makes_no_sense_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError):
        await FileSource(tmp_path / name).read()


async def test_every_address_behind_a_name_is_a_replica() -> None:
    async def resolve(host: str) -> Sequence[str]:
        assert host == "engines"
        return ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"]

    line = "e=http://engines:8000,events=tcp://engines:5557,replay=tcp://*:5558,ranks=2"
    first, second, third = await DNSSource(line, resolve).read()
    assert (first.name, first.url) == ("e-10.0.0.1", "http://10.0.0.1:8000")
    assert (first.events, first.replay, first.ranks) == ("tcp://10.0.0.1:5557", "tcp://*:5558", 2)
    assert second.name == "e-10.0.0.2"
    assert (third.name, third.url, third.events) == (
        "e-fd00::1",
        "http://[fd00::1]:8000",
        "tcp://[fd00::1]:5557",
    )


async def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1" in await addresses_of("localhost")


class Rig:
    """A discovery whose sources say what a test wants."""

    def __init__(self) -> None:
        self.updates: list[list[str]] = []
        self.discovery = Discovery(lambda specs: self.updates.append([spec.name for spec in specs]), 60.0)


class FakeSource:
    def __init__(self, name: str, *lines: str) -> None:
        self.name = name
        self.lines = lines
        self.error: Exception | None = None
        self.changed: Callable[[], None] = lambda: None
        self.trouble: str | None = None
        self.closed = False

    async def read(self) -> tuple[ReplicaSpec, ...]:
        if self.error is not None:
            raise self.error
        return tuple(parse_replica(line) for line in self.lines)

    async def close(self) -> None:
        self.closed = True


async def test_a_source_that_says_so_is_looked_at_before_its_turn(until: Any) -> None:
    rig = Rig()
    source = FakeSource("s", "a=http://h:1")
    await rig.discovery.follow([], [source])
    source.lines = ("b=http://h:1",)
    source.changed()
    await until(lambda: rig.updates[-1] == ["b"], "the change is seen")
    await rig.discovery.follow([], [FakeSource("t", "c=http://h:1")])
    assert (rig.updates[-1], source.closed) == (["c"], True)
    await rig.discovery.close()


def test_kubernetes_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"install warmroute\[kubernetes\]"):
        KubernetesSource("v=http://pod:8000", "app=vllm", "gpu")


async def test_the_fleet_is_told_only_of_what_is_new() -> None:
    rig = Rig()
    source = FakeSource("s", "b=http://h:2")
    await rig.discovery.follow([parse_replica("a=http://h:1")], [source])
    await rig.discovery.look()
    source.lines = ("b=http://h:2", "c=http://h:3")
    await rig.discovery.look()
    assert rig.updates == [["a", "b"], ["a", "b", "c"]]
    await rig.discovery.close()


@pytest.mark.parametrize(
    "error", [SettingsError("nonsense"), OSError("gone"), FileNotFoundError(2, "no file")]
)
async def test_op02_a_source_that_fails_counts_as_it_was(error: Exception) -> None:
    rig = Rig()
    source = FakeSource("s", "a=http://h:1")
    await rig.discovery.follow([], [source])
    source.error = error
    await rig.discovery.look()
    assert rig.updates == [["a"]]
    assert "its 1 replicas stay as they are" in rig.discovery.errors["s"]
    source.error, source.lines = None, ("b=http://h:1",)
    await rig.discovery.look()
    assert (rig.updates[-1], rig.discovery.errors) == (["b"], {})
    await rig.discovery.close()


async def test_what_a_source_has_to_tell_is_told_and_its_replicas_count() -> None:
    rig = Rig()
    source = FakeSource("s", "a=http://h:1")
    await rig.discovery.follow([], [source])
    source.trouble, source.lines = "slow", ("b=http://h:1",)
    await rig.discovery.look()
    assert (rig.updates[-1], rig.discovery.errors) == (["b"], {"s": "s: slow"})
    source.trouble = None
    await rig.discovery.look()
    assert rig.discovery.errors == {}
    await rig.discovery.close()


async def test_op02_new_sources_that_cannot_be_read_leave_the_old_ones_in_place(until: Any) -> None:
    """As with a file's name that is written wrong in the settings."""
    rig = Rig()
    source, wrong = FakeSource("s", "a=http://h:1"), FakeSource("t")
    await rig.discovery.follow([], [source])
    wrong.error = OSError(2, "no file")
    with pytest.raises(SettingsError, match="t: no file"):
        await rig.discovery.follow([parse_replica("b=http://h:2")], [wrong])
    assert (rig.updates, rig.discovery.errors) == ([["a"]], {})
    assert (source.closed, wrong.closed) == (False, True)
    source.lines = ("a=http://h:1", "c=http://h:3")
    source.changed()
    await until(lambda: rig.updates[-1] == ["a", "c"], "the old source is still followed")
    await rig.discovery.close()


async def test_op02_new_sources_that_leave_no_replica_leave_the_old_ones_in_place() -> None:
    """As with a label that no pod has."""
    rig = Rig()
    source, empty = FakeSource("s", "a=http://h:1"), FakeSource("t")
    await rig.discovery.follow([], [source])
    empty.trouble = "no running pod matches"
    with pytest.raises(SettingsError, match="no replica would be left: t: no running pod matches"):
        await rig.discovery.follow([], [empty])
    assert (rig.updates, rig.discovery.errors) == ([["a"]], {})
    assert (source.closed, empty.closed) == (False, True)
    await rig.discovery.follow([], [source, empty])
    source.lines = ()
    await rig.discovery.look()
    assert rig.updates == [["a"], []]  # It is what the sources say.
    await rig.discovery.follow([], [empty])
    await rig.discovery.close()


def test_sources_that_look_elsewhere_are_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    places = [("app=vllm", "gpu"), ("app=vllm", "cpu"), ("app=other", "gpu")]
    names = [KubernetesSource("v=http://pod:1", *place).name for place in places]
    names += [DNSSource(f"v=http://{host}:1", addresses_of).name for host in ("one", "two")]
    assert len(set(names)) == len(names)


async def test_op02_replicas_that_the_fleet_refuses_leave_the_old_ones_in_place() -> None:
    updates: list[list[str]] = []

    def update(specs: Sequence[ReplicaSpec]) -> None:
        if any(spec.name == "bad" for spec in specs):
            raise SettingsError("no key")
        updates.append([spec.name for spec in specs])

    discovery, source = Discovery(update, 60.0), FakeSource("s", "a=http://h:1")
    await discovery.follow([], [source])
    with pytest.raises(SettingsError, match="no key"):
        await discovery.follow([parse_replica("bad=http://h:2")], [source])
    source.lines = ("a=http://h:1", "c=http://h:3")
    await discovery.look()
    assert updates == [["a"], ["a", "c"]]
    await discovery.close()


async def test_of_two_replicas_of_one_name_the_first_counts() -> None:
    rig = Rig()
    sources = [FakeSource("s", "a=http://h:2", "b=http://h:2"), FakeSource("t", "b=http://h:3")]
    await rig.discovery.follow([parse_replica("a=http://h:1")], sources)
    assert rig.updates == [["a", "b"]]
    assert "a, b" in rig.discovery.errors["names"]
    await rig.discovery.close()


async def test_sources_are_looked_at_again_and_again(until: Any) -> None:
    rig = Rig()
    rig.discovery._interval_s = 0.01
    source = FakeSource("s", "a=http://h:1")
    await rig.discovery.follow([], [source])
    source.lines = ("b=http://h:1",)
    await until(lambda: rig.updates[-1] == ["b"], "the change is seen")
    await rig.discovery.close()
