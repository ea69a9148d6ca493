"""The examples for Compose, Kubernetes, Prometheus and Grafana say what this program knows."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

import warmroute
from cli.settings import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
PROMQL_LABELS = {"le", "job"}
DEADLINE_S = 60.0


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def settings_of(arguments: list[str]) -> Any:
    """The settings that a command line means, checked as at a start."""
    name, *rest = arguments
    command = warmroute.main.commands[name]
    values = command.make_context(name, list(rest)).params
    settings = msgspec.convert(values, SECTIONS[name])
    settings.check()
    return settings


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


# Compose and Prometheus


def test_compose_starts_what_it_says_and_looks_where_it_listens() -> None:
    services = documents("compose/compose.yaml")[0]["services"]
    settings = {
        name: settings_of(service["command"]) for name, service in services.items() if "command" in service
    }
    assert {"indexer", "router", "engine-0", "engine-1"} <= settings.keys()
    for name in ("indexer", "router"):
        health = services[name]["healthcheck"]["test"][-1]
        assert f"127.0.0.1:{port(settings[name].listen)}/health" in health
        assert services[name]["pid"] == "service:pause"
        assert settings[name].map == services[name]["volumes"][0].rpartition(":")[2]
    published = {int(line.rpartition(":")[2]) for line in services["router"]["ports"]}
    assert published == {port(settings["router"].listen), settings["router"].admin_address()[1]}
    assert all(line.startswith("127.0.0.1:") for line in services["router"]["ports"])
    for mounted in [*services["prometheus"]["volumes"], *services["grafana"]["volumes"]]:
        assert (ROOT / "compose" / mounted.partition(":")[0]).is_file()


def test_engines_in_compose_leave_no_volumes_behind() -> None:
    # VOLUME gives each container without a map a nameless volume of its own, and `down` leaves those.
    assert not re.search(r"^VOLUME", (ROOT / "compose/Dockerfile").read_text(), re.MULTILINE)


def test_prometheus_scrapes_the_addresses_of_the_metrics() -> None:
    services = documents("compose/compose.yaml")[0]["services"]
    router, indexer = settings_of(services["router"]["command"]), settings_of(services["indexer"]["command"])
    jobs = {job["job_name"]: job for job in documents("compose/prometheus.yaml")[0]["scrape_configs"]}
    host, admin = router.admin_address()
    assert host == "0.0.0.0"
    assert jobs["router"]["static_configs"][0]["targets"] == [f"router:{admin}"]
    assert jobs["indexer"]["static_configs"][0]["targets"] == [f"indexer:{port(indexer.listen)}"]
    assert jobs["indexer"]["honor_labels"] is True


# Kubernetes


def by_kind(path: str) -> dict[str, dict[str, Any]]:
    found = {each["kind"]: each for each in documents(path)}
    assert len(found) == len(documents(path))
    assert all(each["apiVersion"] and each["metadata"]["name"] for each in found.values())
    return found


def test_the_kubernetes_manifest_starts_a_router_and_an_indexer_that_share_a_map() -> None:
    manifest = by_kind("compose/kubernetes.yaml")
    pod = manifest["Deployment"]["spec"]["template"]
    containers = {each["name"]: each for each in pod["spec"]["containers"]}
    indexer, router = (settings_of(containers[name]["args"]) for name in ("indexer", "router"))
    assert pod["spec"]["shareProcessNamespace"] is True
    assert indexer.map == router.map
    mounts = [each["volumeMounts"] for each in containers.values()]
    assert mounts[0] == mounts[1]
    assert indexer.map.startswith(mounts[0][0]["mountPath"])
    assert mounts[0][0]["name"] == pod["spec"]["volumes"][0]["name"]
    assert port(indexer.advertise) == port(router.indexer) == port(indexer.listen)
    assert router.shutdown_delay_s + router.grace_s < pod["spec"]["terminationGracePeriodSeconds"]
    for container, settings in (containers["indexer"], indexer), (containers["router"], router):
        assert settings.listen.startswith("0.0.0.0:")
        for probe in ("livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] == port(settings.listen)
    assert "readinessProbe" not in containers["indexer"]  # a router without a map serves


def test_the_kubernetes_manifest_lets_in_whom_it_should_and_may_do_what_it_must() -> None:
    manifest = by_kind("compose/kubernetes.yaml")
    pod = manifest["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    account = manifest["ServiceAccount"]["metadata"]["name"]
    assert pod["spec"]["serviceAccountName"] == manifest["RoleBinding"]["subjects"][0]["name"] == account
    assert manifest["RoleBinding"]["roleRef"]["name"] == manifest["Role"]["metadata"]["name"]
    assert manifest["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["Service"]["spec"]["selector"] == labels
    for kind, selector in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        assert manifest[kind]["spec"][selector]["matchLabels"] == labels
    router = settings_of(next(c["args"] for c in pod["spec"]["containers"] if c["name"] == "router"))
    everybody, operators = manifest["NetworkPolicy"]["spec"]["ingress"]
    assert [each["port"] for each in everybody["ports"]] == [port(router.listen)]
    assert {each["port"] for each in operators["ports"]} == {router.admin_address()[1], port(router.indexer)}
    assert operators["from"]
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == port(router.listen)


# Grafana


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[list[str]]:
    """A command that serves; the URLs that it names, in order."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmroute", *arguments), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert running.stderr is not None
    urls: list[str] = []
    drain: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not any("listening on" in line for line in urls):
                line = (await running.stderr.readline()).decode()
                assert line, "it ended"
                if "http://" in line:
                    urls.append(line)
        drain = asyncio.create_task(running.stderr.read())
        yield [re.findall(r"http://\S+", line)[-1] for line in urls]
    finally:
        running.terminate()
        await running.wait()
        if drain is not None:
            await drain


async def shown(client: aiohttp.ClientSession, url: str) -> dict[str, set[str]]:
    """The metrics of a page by name, with the labels of their samples."""
    async with client.get(f"{url}/metrics") as answer:
        page = await answer.text()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        names = [family.name, f"{family.name}_total"] if family.type == "counter" else [family.name]
        names += [f"{family.name}_bucket"] if family.type == "histogram" else []
        for name in names:
            found.setdefault(name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> dict[str, list[str]]:
    board = json.loads((ROOT / "compose/grafana/warmroute.json").read_text())
    return {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in board["panels"]}


def test_the_dashboard_has_what_an_operator_asks_for() -> None:
    asked = " ".join(expression for each in panels().values() for expression in each)
    for metric in (
        *("router_other_requests", "router_load_age_seconds", "router_replica_ejected"),
        *("router_doors_refused_total", "indexer_silent_seconds", "indexer_write_trouble"),
        *("indexer_shard_up", "router_cached_tokens_total", "router_ttft_seconds_bucket"),
    ):
        assert f"warmroute_{metric}" in asked


def labels_in(expression: str) -> set[str]:
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    return {label.strip() for group in grouped for label in group.split(",")} - {"le"}


async def test_the_dashboard_asks_for_metrics_and_labels_that_running_processes_show(tmp_path: Path) -> None:
    digest, events = hashlib.sha256(b"k").hexdigest(), f"ipc://{tmp_path}/events"
    any_port = ("--listen", "127.0.0.1:0")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        (engine,) = await stack.enter_async_context(process("engine", *any_port, "--events", events))
        (indexer,) = await stack.enter_async_context(
            process("indexer", *any_port, "--map", str(tmp_path / "map"), "--shards", "2")
        )
        replica = ("--replica", f"e0={engine},events={events}", "--indexer", indexer)
        admin, door = await stack.enter_async_context(
            process("router", *any_port, *replica, "--api-key", f"team={digest}")
        )
        body = {"model": "model", "prompt": "hello", "stream": True, "max_tokens": 1}
        for key, status in ("k", 200), ("wrong", 401):
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{door}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == status
                await answer.read()
        async with asyncio.timeout(DEADLINE_S):
            while not (names := await shown(client, indexer)).get("warmroute_indexer_stream_state"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        names |= await shown(client, admin)
    for title, expressions in panels().items():
        for expression in expressions:
            for name in re.findall(r"warmroute_\w+", expression):
                assert name in names, title
                assert not names[name] or labels_in(expression) <= names[name], title
    for name in ("router_doors_refused_total", "indexer_stream_state", "router_ttft_seconds_bucket"):
        assert names[f"warmroute_{name}"]
