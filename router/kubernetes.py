"""Replicas that are the pods of a selector, followed at the Kubernetes API (extra ``kubernetes``)."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from events.logs import Throttled
from router.errors import SettingsError
from router.replicas import ReplicaSpec, parse_replica, placed_at

log = logging.getLogger(__name__)

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
WATCH_S = 240
"""A watch ends after so long, and the pods are listed anew: what was missed is missed no longer than that."""
RETRY_S = 2.0
FIRST_LOOK_S = 5.0

OpenApi = Callable[[], Awaitable[Any]]
"""Makes a ``kubernetes_asyncio.client.ApiClient``."""


async def open_api() -> Any:
    """A client with the pod's service account, or with the user's kubeconfig outside of a cluster."""
    config = importlib.import_module("kubernetes_asyncio.config")
    try:
        config.load_incluster_config()
    except config.ConfigException:
        await config.load_kube_config()
    return importlib.import_module("kubernetes_asyncio.client").ApiClient()


def namespace_of(configured: str | None) -> str:
    """The namespace to look in: our own unless configured."""
    if configured is not None:
        return configured
    return OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"


class KubernetesSource:
    """Every running pod of ``selector`` is a replica, called NAME-POD.

    ``line`` is as for a single replica; the pod's address takes the place of its host. A pod that is being
    deleted is none any more, ready or not: its engine has been told to end. Readiness does not count: a pod
    that is not ready for a while keeps its cache, and the router checks health itself.
    """

    def __init__(
        self, line: str, selector: str, namespace: str | None, opened: OpenApi | None = None
    ) -> None:
        self._spec = parse_replica(line)
        self._selector = selector
        self._namespace = namespace_of(namespace)
        self._opened = opened or open_api
        self.name = f"--kubernetes {self._spec.name}"
        self.changed: Callable[[], None] = lambda: None
        self._pods: dict[str, str] = {}
        self._error: str | None = None
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._throttled = Throttled(log)
        if opened is None and importlib.util.find_spec("kubernetes_asyncio") is None:
            raise SettingsError(f"{self.name}: install warmroute[kubernetes]")

    async def read(self) -> tuple[ReplicaSpec, ...]:
        """The pods as they are known now; waits for the first look."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=self.name)
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._looked.wait()
        except TimeoutError as error:
            raise SettingsError("the Kubernetes API has not answered yet") from error
        if self._error is not None:
            raise SettingsError(self._error)
        return tuple(
            placed_at(self._spec, address, f"{self._spec.name}-{pod}")
            for pod, address in sorted(self._pods.items())
        )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                async with await self._opened() as api:
                    while True:
                        await self._watch(importlib.import_module("kubernetes_asyncio.client").CoreV1Api(api))
            except Exception as error:
                # The API may be away, refuse us, or say that what we know is too old: begin anew.
                self._error = f"the Kubernetes API does not answer as it should: {_told(error)}"
                self._throttled.warning(self.name, "%s: %s", self.name, self._error)
                self._tell()
            await asyncio.sleep(RETRY_S)

    async def _watch(self, api: Any) -> None:
        """Lists the pods, and follows them until the watch ends. Raises what the client raises."""
        where = {"namespace": self._namespace, "label_selector": self._selector}
        listed = await api.list_namespaced_pod(**where)
        self._pods = {pod.metadata.name: pod.status.pod_ip for pod in listed.items if _serves(pod)}
        self._error = None
        self._tell()
        watch = importlib.import_module("kubernetes_asyncio.watch").Watch()
        since = listed.metadata.resource_version
        async with watch.stream(
            api.list_namespaced_pod, **where, resource_version=since, timeout_seconds=WATCH_S
        ) as events:
            async for event in events:
                pod = event["object"]
                if event["type"] == "DELETED" or not _serves(pod):
                    self._pods.pop(pod.metadata.name, None)
                else:
                    self._pods[pod.metadata.name] = pod.status.pod_ip
                self._tell()

    def _tell(self) -> None:
        self._looked.set()
        self.changed()


def _serves(pod: Any) -> bool:
    running = pod.status.phase == "Running" and bool(pod.status.pod_ip)
    return running and pod.metadata.deletion_timestamp is None


def _told(error: Exception) -> str:
    status = getattr(error, "status", None)
    return f"{type(error).__name__} {status}" if status else (str(error) or type(error).__name__)
