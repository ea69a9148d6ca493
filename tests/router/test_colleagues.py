"""One page of what several workers say."""

from __future__ import annotations

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.colleagues import Colleagues, together


def page(count: int) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("warmroute_router_x", "Things", ("name",), registry=registry)
    counter.labels('a "b"\n\\').inc(count)
    Histogram("warmroute_router_y", "Times", buckets=(1, 2), registry=registry).observe(count)
    return generate_latest(registry)


def test_the_metrics_of_workers_are_one_page_that_says_who_is_not_there() -> None:
    merged = together({0: page(1), 2: page(3), 1: None}).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    counts = {
        (sample.labels["worker"], sample.labels["name"]): sample.value
        for sample in families["warmroute_router_x"].samples
        if sample.name.endswith("_total")
    }
    assert counts == {("0", 'a "b"\n\\'): 1, ("2", 'a "b"\n\\'): 3}
    up = {sample.labels["worker"]: sample.value for sample in families["warmroute_router_worker_up"].samples}
    assert up == {"0": 1, "1": 0, "2": 1}
    assert merged.count("# TYPE warmroute_router_y histogram") == 1
    for number, total in (("0", "1.0"), ("2", "3.0")):
        assert f'warmroute_router_y_sum{{worker="{number}"}} {total}' in merged


async def test_one_that_does_not_answer_is_none_and_keeps_nobody() -> None:
    async with aiohttp.ClientSession() as session:
        colleagues = Colleagues(0, 3, lambda: {1: "http://127.0.0.1:9"}, session)
        assert await colleagues.pages("/metrics", {}) == {1: None, 2: None}
        assert await colleagues.page(1, "/metrics", {}) is None
        assert await colleagues.page(7, "/metrics", {}) is None
