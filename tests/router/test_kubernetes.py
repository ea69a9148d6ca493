"""Pods as replicas, over the real client and a real socket; the API server is made up, and answers as a real
one (1.20.2) was seen to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router import kubernetes
from router.discovery import Discovery
from router.errors import SettingsError
from router.kubernetes import KubernetesSource
from router.replicas import ReplicaSpec

client = pytest.importorskip("kubernetes_asyncio.client")


def pod(name: str, address: str | None, *, phase: str = "Running", deleted: bool = False) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if deleted:
        metadata["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    # It stays ready while it is being deleted: readiness must not count.
    conditions = [{"type": "Ready", "status": "True"}]
    return {"metadata": metadata, "status": {"phase": phase, "podIP": address, "conditions": conditions}}


class ApiServer:
    """Lists and watches pods as an API server does."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.queries: list[dict[str, str]] = []
        self.watchers: list[asyncio.Queue[dict[str, Any] | bytes | None]] = []
        self.refused: dict[str, web.Response] = {}
        self.silent = False
        self.token = "Bearer first"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/gpu/pods", self._pods)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def refuse(self, code: int, why: str, *verbs: str) -> None:
        """Lists, watches or both are refused from now on."""
        status = {"kind": "Status", "status": "Failure", "message": why, "code": code}
        self.refused = {verb: web.json_response(status, status=code) for verb in verbs}

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        verb = "watch" if request.query.get("watch") in ("true", "True") else "list"
        if request.headers["Authorization"] != self.token:
            self.refuse(401, "Unauthorized", "list", "watch")
        if self.silent:
            await asyncio.Event().wait()
        if (refused := self.refused.get(verb)) is not None:
            return web.Response(body=refused.body, status=refused.status, content_type=refused.content_type)
        if verb == "list":
            items = list(self.pods.values())
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any] | bytes | None] = asyncio.Queue()
        self.watchers.append(events)
        while (event := await events.get()) is not None:
            if isinstance(event, bytes):
                await response.write(event)
                assert request.transport is not None
                request.transport.close()
                break
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    def say(self, kind: str, said: dict[str, Any] | None) -> None:
        """Tells all watchers of a pod; None ends their watches."""
        for events in self.watchers:
            events.put_nowait(said and {"type": kind, "object": said})
        if said is None:
            self.watchers.clear()

    def crash(self) -> None:
        """Breaks all watches, within an event."""
        for events in self.watchers:
            events.put_nowait(b'{"type":"ADD')
        self.watchers.clear()

    @property
    def lists(self) -> int:
        """How often pods were listed."""
        return sum("watch" not in query for query in self.queries)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    monkeypatch.setattr(kubernetes, "RETRY_S", 0.02)
    await server.start()
    yield server
    server.say("", None)
    await server.stop()


class Followed:
    """A discovery that follows pods, and what it told."""

    def __init__(self, server: ApiServer) -> None:
        async def opened() -> Any:
            configuration = client.Configuration(host=server.url)
            configuration.api_key = {"BearerToken": self.token}
            return client.ApiClient(configuration)

        line = "v=http://pod:8000,events=tcp://pod:5557,replay=tcp://*:5558"
        self.source = KubernetesSource(line, "app=vllm", "gpu", opened)
        self.token = server.token
        self.specs: list[ReplicaSpec] = []
        self.discovery = Discovery(self._update, 60.0)

    def _update(self, specs: Any) -> None:
        self.specs = list(specs)

    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]


@pytest.fixture
async def followed(server: ApiServer) -> AsyncIterator[Followed]:
    server.pods = {name: pod(name, f"10.0.0.{n}") for n, name in enumerate("ab")}
    followed = Followed(server)
    await followed.discovery.follow([], [followed.source])
    yield followed
    await followed.discovery.close()


async def test_running_pods_of_a_selector_are_replicas(server: ApiServer, followed: Followed) -> None:
    assert followed.names() == ["v-a", "v-b"]
    second = followed.specs[1]
    assert (second.url, second.events, second.replay) == (
        "http://10.0.0.1:8000",
        "tcp://10.0.0.1:5557",
        "tcp://*:5558",
    )
    assert server.queries[0]["labelSelector"] == "app=vllm"


async def test_op01_a_pod_that_is_being_deleted_is_no_replica_though_it_is_ready(
    server: ApiServer, followed: Followed, until: Any
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.say("MODIFIED", pod("a", "10.0.0.0", deleted=True))
    await until(lambda: followed.names() == ["v-b"], "it is taken out")
    server.say("DELETED", pod("a", "10.0.0.0", deleted=True))
    server.say("ADDED", pod("c", None, phase="Pending"))
    server.say("MODIFIED", pod("c", "10.0.0.9"))
    await until(lambda: followed.names() == ["v-b", "v-c"], "another one is let in")
    server.say("MODIFIED", pod("b", "10.0.0.1", phase="Failed"))
    await until(lambda: followed.names() == ["v-c"], "the one that failed is out")


async def test_pods_are_listed_anew_when_a_watch_ends(
    server: ApiServer, followed: Followed, until: Any
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.pods = {"z": pod("z", "10.0.0.7")}
    server.say("", None)
    await until(lambda: followed.names() == ["v-z"], "they are listed anew")


FORBIDDEN = 'pods is forbidden: User "system:serviceaccount:gpu:w" cannot {} resource "pods" in API group ""'


@pytest.mark.parametrize(("code", "why"), [(403, FORBIDDEN.format("list")), (410, "too old"), (500, "etcd")])
async def test_op02_an_api_that_refuses_leaves_the_replicas_as_they_are_and_says_why(
    server: ApiServer, followed: Followed, until: Any, code: int, why: str
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.refuse(code, why, "list")
    server.say("", None)
    await until(lambda: bool(followed.discovery.errors), "it is told")
    assert f"{code}: {why}; its 2 replicas stay as they are" in str(followed.discovery.errors.values())
    assert followed.names() == ["v-a", "v-b"]
    server.refused, server.pods = {}, {"z": pod("z", "10.0.0.7")}
    await until(lambda: followed.names() == ["v-z"], "it goes on")
    assert followed.discovery.errors == {}


async def test_without_the_right_to_watch_pods_are_listed_again_and_again_and_it_is_told(
    server: ApiServer, followed: Followed, until: Any
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.refuse(403, FORBIDDEN.format("watch"), "watch")
    server.pods = {"z": pod("z", "10.0.0.7")}
    server.say("", None)
    await until(lambda: followed.names() == ["v-z"], "they are listed anew")
    server.pods = {"y": pod("y", "10.0.0.8")}
    await until(lambda: followed.names() == ["v-y"], "and once more")
    await until(lambda: "cannot watch" in str(followed.discovery.errors), "it is told")
    server.refused = {}
    await until(lambda: bool(server.watchers), "the pods are watched again")
    await until(lambda: followed.source.trouble is None, "all is well again")


async def test_a_list_that_is_too_old_to_go_on_from_is_no_trouble(
    server: ApiServer, followed: Followed, until: Any
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.pods = {"z": pod("z", "10.0.0.7")}
    server.say("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
    await until(lambda: followed.names() == ["v-z"], "they are listed anew")
    assert (followed.source.trouble, followed.discovery.errors) == (None, {})


async def test_a_watch_that_breaks_is_no_trouble_while_another_api_server_answers(
    server: ApiServer, followed: Followed, until: Any
) -> None:
    told: list[str] = []
    await until(lambda: bool(server.watchers), "the pods are watched")
    heed = followed.source.changed
    followed.source.changed = lambda: (told.append(str(followed.source._error)), heed())[1]
    server.pods = {"z": pod("z", "10.0.0.7")}
    server.crash()
    await until(lambda: followed.names() == ["v-z"], "they are listed anew")
    assert set(told) == {"None"}


async def test_a_watch_that_has_gone_silent_ends(
    server: ApiServer, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when something between us drops the connection and says nothing; the server would have ended it."""
    await until(lambda: bool(server.watchers), "the pods are watched")
    monkeypatch.setattr(kubernetes, "WATCH_S", 0.1)
    monkeypatch.setattr(kubernetes, "ANSWER_S", 0.1)
    server.say("", None)
    await until(lambda: bool(server.watchers), "the pods are watched, for a shorter time")
    server.pods = {"z": pod("z", "10.0.0.7")}
    await until(lambda: followed.names() == ["v-z"], "they are listed anew")


async def test_an_api_that_does_not_answer_is_told_of(
    server: ApiServer, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    monkeypatch.setattr(kubernetes, "ANSWER_S", 0.1)
    server.silent = True
    server.say("", None)
    await until(lambda: "no answer within 0.1 s" in str(followed.discovery.errors), "it is told")
    assert followed.names() == ["v-a", "v-b"]
    server.silent = False
    await until(lambda: followed.discovery.errors == {}, "all is well again")


async def test_a_watch_that_ends_at_once_is_followed_by_a_pause(
    server: ApiServer, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    monkeypatch.setattr(kubernetes, "RETRY_S", 60.0)
    server.say("", None)
    await asyncio.sleep(0.1)
    assert server.lists == 1


async def test_a_refused_token_is_read_anew(server: ApiServer, followed: Followed, until: Any) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.token = "Bearer second"
    server.say("", None)
    await until(lambda: "401: Unauthorized" in str(followed.discovery.errors), "it is refused")
    server.refused, followed.token = {}, "Bearer second"
    await until(lambda: followed.discovery.errors == {}, "the new one is taken")


async def test_events_that_move_no_pod_tell_nobody(server: ApiServer, followed: Followed, until: Any) -> None:
    await until(lambda: bool(server.watchers), "the pods are watched")
    told: list[None] = []
    followed.source.changed = lambda: told.append(None)
    for _ in range(5):
        server.say("MODIFIED", pod("a", "10.0.0.0"))
        server.say("BOOKMARK", {"metadata": {"resourceVersion": "8"}})
        server.say("MODIFIED", pod("c", None, phase="Pending"))
        server.say("DELETED", pod("c", None, phase="Pending"))
    server.say("ADDED", pod("d", "10.0.0.3"))
    await until(lambda: bool(told), "a new pod is told of")
    assert len(told) == 1


async def test_a_selector_that_matches_nothing_is_told_of(server: ApiServer, until: Any) -> None:
    followed = Followed(server)
    await followed.discovery.follow([], [followed.source])
    name = "--kubernetes v (app=vllm in gpu)"
    assert followed.discovery.errors == {name: f"{name}: no running pod matches"}
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.say("ADDED", pod("a", "10.0.0.1"))
    await until(lambda: followed.names() == ["v-a"], "the first one has come")
    await until(lambda: followed.discovery.errors == {}, "all is well")
    await followed.discovery.close()


async def test_without_account_and_kubeconfig_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    nowhere = str(tmp_path / "none")
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", nowhere)
    with pytest.raises(SettingsError, match=r"no service account \(.+\), and no kubeconfig \(.+\); in a pod"):
        await kubernetes.open_api()
