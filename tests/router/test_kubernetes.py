"""Pods as replicas, over the real client and a real socket; the API server is made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from router import kubernetes
from router.discovery import Discovery
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
        self.watchers: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.status = 200

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/gpu/pods", self._pods)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if request.query.get("watch") not in ("true", "True"):
            items = list(self.pods.values())
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.watchers.append(events)
        while (event := await events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    def say(self, kind: str, said: dict[str, Any] | None) -> None:
        """Tells all watchers of a pod; None ends their watches."""
        for events in self.watchers:
            events.put_nowait(said and {"type": kind, "object": said})
        if said is None:
            self.watchers.clear()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    yield server
    server.say("", None)
    await server.stop()


class Followed:
    """A discovery that follows pods, and what it told."""

    def __init__(self, server: ApiServer) -> None:
        async def opened() -> Any:
            return client.ApiClient(client.Configuration(host=server.url))

        line = "v=http://pod:8000,events=tcp://pod:5557,replay=tcp://*:5558"
        self.source = KubernetesSource(line, "app=vllm", "gpu", opened)
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


@pytest.mark.parametrize("status", [403, 410, 500])
async def test_op02_an_api_that_fails_leaves_the_replicas_as_they_are(
    server: ApiServer, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(kubernetes, "RETRY_S", 0.02)
    await until(lambda: bool(server.watchers), "the pods are watched")
    server.status = status
    server.say("", None)
    await until(lambda: bool(followed.discovery.errors), "it is told")
    assert f"ApiException {status}" in str(followed.discovery.errors)
    assert followed.names() == ["v-a", "v-b"]
    server.status, server.pods = 200, {"z": pod("z", "10.0.0.7")}
    await until(lambda: followed.names() == ["v-z"], "it goes on")
    assert followed.discovery.errors == {}


async def test_an_event_that_is_an_error_is_no_pod(
    server: ApiServer, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "RETRY_S", 0.02)
    await until(lambda: bool(server.watchers), "the pods are watched")
    asked = len(server.queries)
    server.say("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
    await until(lambda: len(server.queries) >= asked + 2, "the pods are listed anew")
    await until(lambda: followed.discovery.errors == {}, "all is well again")
    assert followed.names() == ["v-a", "v-b"]
