from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from router.reported import Reported, UnreadableReportError, read_report

# Lines as vLLM 0.32 writes them.
VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="model"} 3.0
vllm:num_requests_waiting{engine="0",model_name="model"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="model",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.25
vllm:generation_tokens_total{engine="0",model_name="model"} 100.0
vllm:prompt_tokens_total{engine="0",model_name="model"} 1e+03
vllm:prefix_cache_queries_total{engine="0",model_name="model"} 1500.0
vllm:prefix_cache_hits_total{engine="0",model_name="model"} 400.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="129"} 1.0
process_start_time_seconds 1.76e+09
"""


def test_a_report_says_requests_room_and_work_of_a_rank() -> None:
    report = read_report(VLLM)
    assert report.started == 1.76e9
    assert report.ranks == {
        0: Reported(
            running=3,
            waiting=2,
            capacity_tokens=32 * 129,
            usage=0.25,
            worked_tokens=1100,
            admitted_tokens=1100,
        )
    }


def test_ranks_are_told_apart_by_the_engine_label() -> None:
    report = read_report(VLLM + VLLM.replace(b'engine="0"', b'engine="1"').replace(b"} 3.0", b"} 7.0"))
    assert {rank: reported.running for rank, reported in report.ranks.items()} == {0: 3, 1: 7}


def test_several_models_of_a_rank_add_up_and_several_start_times_are_none() -> None:
    other = VLLM.replace(b'model_name="model"', b'model_name="m2"').replace(b"1.76e+09", b"1.77e+09")
    report = read_report(VLLM + other)
    assert (report.ranks[0].running, report.started) == (6, None)


def test_an_engine_without_a_prefix_cache_does_not_say_what_it_has_begun_with() -> None:
    assert read_report(VLLM.replace(b"prefix_cache", b"other")).ranks[0].admitted_tokens is None


def test_quotes_in_label_values_do_not_confuse() -> None:
    family = GaugeMetricFamily("vllm:num_requests_running", "", labels=("model_name", "engine"))
    family.add_metric(('a",engine="9} 8\n', "1"), 4)
    registry = CollectorRegistry()
    registry.register(type("Once", (), {"collect": lambda self: [family]})())
    assert read_report(generate_latest(registry)).ranks[1].running == 4


def test_room_that_is_not_known_yet_costs_nothing_else() -> None:
    ranks = read_report(VLLM.replace(b'num_gpu_blocks="129"', b'num_gpu_blocks="None"')).ranks
    assert (ranks[0].running, ranks[0].capacity_tokens) == (3, None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not metrics at all",
        b"up 1\n",
        b'vllm:num_requests_running{engine="x"} 1\n',
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running +Inf\n",
    ],
)
def test_what_says_nothing_of_a_load_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableReportError):
        read_report(text)
