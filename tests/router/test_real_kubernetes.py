"""Against a real API server, where WARMROUTE_KUBE_ASSETS names a folder with ``etcd`` and ``kube-apiserver``,
such as setup-envtest makes. There is no kubelet: what becomes of pods is written by the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import kubernetes
from router.discovery import Discovery
from router.kubernetes import KubernetesSource

ASSETS = Path(os.environ.get("WARMROUTE_KUBE_ASSETS", "/nowhere"))
pytestmark = pytest.mark.skipif(
    not (ASSETS / "kube-apiserver").exists(), reason="no kube-apiserver in WARMROUTE_KUBE_ASSETS"
)
client = pytest.importorskip("kubernetes_asyncio.client")

EXAMPLE = Path(__file__).parents[2] / "compose/kubernetes.yaml"
CORE, RIGHTS = "/api/v1/namespaces/default", "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
ACCOUNTS, PODS = f"{CORE}/serviceaccounts", f"{CORE}/pods"
PLACES = {"ServiceAccount": ACCOUNTS, "Role": f"{RIGHTS}/roles", "RoleBinding": f"{RIGHTS}/rolebindings"}
START_S = 60.0


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


class Cluster:
    """An API server and its store, and what an administrator does there."""

    def __init__(self, folder: Path, certificates: Path) -> None:
        self.authority = str(certificates / "ca.pem")
        self._context = ssl.create_default_context(cafile=self.authority)
        store, peers, address = free_address(), free_address(), free_address()
        self.url = f"https://{address}"
        (folder / "tokens.csv").write_text('admin,admin,admin,"system:masters"\n')
        etcd = (
            *(f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"),
            *(f"--listen-client-urls=http://{store}", f"--advertise-client-urls=http://{store}"),
            *(f"--listen-peer-urls=http://{peers}", f"--initial-advertise-peer-urls=http://{peers}"),
            f"--initial-cluster=default=http://{peers}",
        )
        certificate, key = certificates / "server.pem", certificates / "server.key"
        self._arguments = (
            *(f"--etcd-servers=http://{store}", f"--cert-dir={folder}"),
            *("--bind-address=127.0.0.1", f"--secure-port={address.rpartition(':')[2]}"),
            *(f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}"),
            *(f"--service-account-key-file={certificate}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC"),
            *("--service-cluster-ip-range=10.0.0.0/24", f"--token-auth-file={folder / 'tokens.csv'}"),
            "--disable-admission-plugins=ServiceAccount",
        )
        self._log = (folder / "log").open("wb")
        self._store = self._run("etcd", etcd)
        self._server = self._run("kube-apiserver", self._arguments)

    def wait(self) -> None:
        """Until it answers, and has made the namespace."""
        end = time.monotonic() + START_S
        while self._server.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.ask("GET", CORE)
                return
            time.sleep(0.1)
        pytest.fail(f"no API server; see {self._log.name}")

    def restart(self) -> None:
        self._server = self._run("kube-apiserver", self._arguments)
        self.wait()

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()

    def stop(self) -> None:
        self.kill()
        self._store.kill()
        self._store.wait()
        self._log.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """An administrator's request. Raises OSError, for refusals too."""
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {"Authorization": "Bearer admin", "Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
            return json.load(answer)

    def token(self) -> str:
        made = self.ask("POST", f"{ACCOUNTS}/warmroute/token", {"spec": {}})
        return str(made["status"]["token"])

    def allow(self, *verbs: str) -> None:
        rule = {"apiGroups": [""], "resources": ["pods"], "verbs": verbs}
        self.ask("PATCH", f"{RIGHTS}/roles/warmroute", {"rules": [rule]})

    def run_pod(self, name: str, address: str) -> None:
        spec = {"nodeName": "n", "containers": [{"name": "vllm", "image": "vllm"}]}
        self.ask("POST", PODS, {"metadata": {"name": name, "labels": {"app": "vllm"}}, "spec": spec})
        self.move_pod(name, address)

    def move_pod(self, name: str, address: str, phase: str = "Running") -> None:
        status = {"phase": phase, "podIP": address, "podIPs": [{"ip": address}]}
        self.ask("PATCH", f"{PODS}/{name}/status", {"status": status})

    def _run(self, program: str, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([ASSETS / program, *arguments], stdout=self._log, stderr=self._log)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Cluster]:
    """One with the account and the rights of our example, and nothing else."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), certificates)
    try:
        cluster.wait()
        for each in yaml.safe_load_all(EXAMPLE.read_text()):
            if each["kind"] in PLACES:
                cluster.ask("POST", PLACES[each["kind"]], each)
        yield cluster
    finally:
        cluster.stop()


class Followed:
    """A discovery of the cluster's pods, with a token of the example's account."""

    def __init__(self, cluster: Cluster) -> None:
        self.token, self.found = cluster.token(), dict[str, str]()

        async def opened() -> Any:
            configuration = client.Configuration(host=cluster.url)
            configuration.ssl_ca_cert = cluster.authority
            configuration.api_key = {"BearerToken": f"Bearer {self.token}"}
            return client.ApiClient(configuration)

        self.source = KubernetesSource("v=http://pod:80", "app=vllm", "default", opened)
        self.discovery = Discovery(self._update, 0.1)

    def _update(self, specs: Any) -> None:
        self.found = {spec.name: spec.host for spec in specs}

    @property
    def said(self) -> str:
        return " ".join(self.discovery.errors.values())


@pytest.fixture
async def followed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(kubernetes, "RETRY_S", 0.2)
    followed = Followed(cluster)
    await followed.discovery.follow([], [followed.source])
    yield followed
    await followed.discovery.close()
    cluster.ask("DELETE", f"{PODS}?gracePeriodSeconds=0")


async def test_op01_pods_come_move_and_go(cluster: Cluster, followed: Followed, until: Any) -> None:
    assert "(app=vllm in default): no running pod matches" in followed.said
    cluster.run_pod("a", "10.0.0.1")
    cluster.run_pod("b", "10.0.0.2")
    await until(lambda: followed.found == {"v-a": "10.0.0.1", "v-b": "10.0.0.2"}, "both are there")
    cluster.move_pod("a", "10.0.0.3")
    await until(lambda: followed.found["v-a"] == "10.0.0.3", "it has moved")
    cluster.ask("PATCH", f"{PODS}/a", {"metadata": {"labels": {"app": "other"}}})
    await until(lambda: list(followed.found) == ["v-b"], "it is no longer meant")
    cluster.ask("PATCH", f"{PODS}/a", {"metadata": {"labels": {"app": "vllm"}}})
    await until(lambda: list(followed.found) == ["v-a", "v-b"], "it is meant again")
    going = cluster.ask("DELETE", f"{PODS}/a")
    assert going["metadata"]["deletionTimestamp"]
    await until(lambda: list(followed.found) == ["v-b"], "it is told to end")
    cluster.move_pod("b", "10.0.0.2", "Failed")
    await until(lambda: followed.found == {}, "it has failed")
    assert cluster.ask("GET", PODS)["items"]


async def test_op02_a_server_that_is_killed_leaves_the_pods_as_they_were(
    cluster: Cluster, followed: Followed, until: Any
) -> None:
    cluster.run_pod("a", "10.0.0.1")
    await until(lambda: list(followed.found) == ["v-a"], "it is there")
    cluster.kill()
    await until(lambda: "Cannot connect" in followed.said, "it is told")
    assert list(followed.found) == ["v-a"]
    cluster.restart()
    cluster.run_pod("b", "10.0.0.2")
    await until(lambda: list(followed.found) == ["v-a", "v-b"], "it goes on")
    await until(lambda: followed.said == "", "all is well")


async def test_op02_a_missing_right_and_a_void_token_are_told_in_the_servers_words(
    cluster: Cluster, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    cluster.run_pod("a", "10.0.0.1")
    await until(lambda: list(followed.found) == ["v-a"], "it is there")
    cluster.kill()  # The watch that runs has a longer time.
    cluster.restart()
    cluster.allow("list")
    await until(lambda: 'warmroute" cannot watch resource "pods"' in followed.said, "no watching is told")
    cluster.run_pod("b", "10.0.0.2")
    await until(lambda: list(followed.found) == ["v-a", "v-b"], "the list has it")
    cluster.allow("watch")
    await until(lambda: 'warmroute" cannot list resource "pods"' in followed.said, "no listing is told")
    cluster.allow("list", "watch")
    await until(lambda: followed.said == "", "all is well")
    cluster.ask("DELETE", f"{ACCOUNTS}/warmroute")
    cluster.ask("POST", ACCOUNTS, {"metadata": {"name": "warmroute"}})
    cluster.kill()  # It believes a token for ten seconds more.
    cluster.restart()
    await until(lambda: "401: Unauthorized" in followed.said, "the token is void")
    assert list(followed.found) == ["v-a", "v-b"]
    followed.token = cluster.token()
    await until(lambda: followed.said == "", "the new one is taken")


async def test_a_state_that_is_forgotten_ends_a_watch_without_a_word(
    cluster: Cluster, followed: Followed
) -> None:
    async with await followed.source._opened() as api:
        await followed.source._watch(client.CoreV1Api(api).list_namespaced_pod, "1")
    assert "cannot be watched" not in str(followed.source.trouble)
