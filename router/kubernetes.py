"""Replicas that are the pods of a selector, followed at the Kubernetes API (extra ``kubernetes``)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from router.errors import SettingsError
from router.pods import ApiRefusedError, heard, listed
from router.replicas import ReplicaSpec, parse_replica, placed_at

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
WATCH_S = 120
"""A watch ends after so long, and the pods are listed anew: what was missed is missed no longer than that."""
ANSWER_S = 30.0
"""An answer may take so long, and a watch that much longer than it should: then it counts as broken."""
RETRY_S = 2.0
"""Between two looks, unless a watch lasted longer."""
FIRST_LOOK_S = 5.0
EXPIRED = 410
"""The code of an event that says that the list is too old to go on from."""

OpenApi = Callable[[], Awaitable[Any]]
"""Makes a ``kubernetes_asyncio.client.ApiClient``."""


async def open_api() -> Any:
    """A client with the pod's service account, or with the user's kubeconfig outside of a cluster.

    Raises SettingsError if there is neither.
    """
    config = importlib.import_module("kubernetes_asyncio.config")
    try:
        config.load_incluster_config()
    except config.ConfigException as missing:
        try:
            await config.load_kube_config()
        except config.ConfigException as error:
            raise SettingsError(
                f"no service account ({missing}), and no kubeconfig ({error}); "
                "in a pod: serviceAccountName, and automountServiceAccountToken not false"
            ) from error
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
        self.name = f"--kubernetes {self._spec.name} ({selector} in {self._namespace})"
        self.changed: Callable[[], None] = lambda: None
        self._pods: dict[str, str] = {}
        self._error: str | None = None
        self._unwatched: str | None = None
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
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

    @property
    def trouble(self) -> str | None:
        """What is wrong though the pods can be listed."""
        if self._unwatched is not None:
            return f"pods are listed every {RETRY_S:g} s, since they cannot be watched: {self._unwatched}"
        if not self._pods:
            return "no running pod matches"
        return None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            try:
                # Takes up to a second: elsewhere, so that requests go on.
                client = await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.client")
                async with await self._opened() as api:
                    pods = client.CoreV1Api(api).list_namespaced_pod
                    while True:
                        since, began = await self._list(pods), now()
                        await self._watch(pods, since)
                        if now() - began < RETRY_S:
                            await asyncio.sleep(RETRY_S)
            except Exception as error:
                # The API may be away, or refuse us: begin anew, with the token and CA that are there then.
                self._error = f"the Kubernetes API does not answer as it should: {_told(error)}"
                self._tell()
            await asyncio.sleep(RETRY_S)

    async def _list(self, pods: Any) -> str:
        """Takes in all pods, and says which state of the cluster that was."""
        async with self._asked(pods, ANSWER_S) as response:
            self._pods, state = listed(await response.read())
        self._error = None
        self._tell()
        return state

    async def _watch(self, pods: Any, since: str) -> None:
        """Follows the pods until the watch ends, breaks or is refused: what then is, a list says."""
        try:
            asked = self._asked(
                pods, WATCH_S + ANSWER_S, watch=True, resource_version=since, timeout_seconds=WATCH_S
            )
            async with asked as response:
                self._unwatched = None
                async for line in response.content:
                    self._take(line)
        except ApiRefusedError as error:
            if error.code != EXPIRED:
                self._unwatched = str(error)
        except (aiohttp.ClientError, TimeoutError):
            # An API server that goes down breaks all watches; another one may be there already.
            return

    @contextlib.asynccontextmanager
    async def _asked(self, pods: Any, wait_s: float, **query: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        query |= {"namespace": self._namespace, "label_selector": self._selector}
        async with await pods(**query, _preload_content=False, _request_timeout=wait_s) as response:
            if response.status != 200:
                raise ApiRefusedError(response.status, await response.read())
            yield response

    def _take(self, line: bytes) -> None:
        name, address = heard(line) or (None, None)
        if name is None or address == self._pods.get(name):
            return
        if address is None:
            del self._pods[name]
        else:
            self._pods[name] = address
        self._tell()

    def _tell(self) -> None:
        self._looked.set()
        self.changed()


def _told(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_S:g} s"
    return str(error) or type(error).__name__
