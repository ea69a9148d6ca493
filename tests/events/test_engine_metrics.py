"""What is read of an engine's ``/metrics``."""

from events.engine_metrics import EngineMetrics, read_engine_metrics

VLLM = b"""
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 100.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="m"} 5.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="99"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="1",num_gpu_blocks="99"} 1.0
"""


def test_what_all_ranks_say_together() -> None:
    assert read_engine_metrics(VLLM) == EngineMetrics(1.7e9, 12, True, 16)


def test_what_is_not_said_or_makes_no_sense_is_not_known() -> None:
    assert read_engine_metrics(b"") == EngineMetrics()
    assert read_engine_metrics(b"vllm:cache_config_info{} 1\n\xff\xfe") == EngineMetrics()
    assert read_engine_metrics(VLLM.replace(b'size="16"', b'size="8"', 1)).block_size is None
    assert read_engine_metrics(VLLM.replace(b'size="16"', b'size="x"')).block_size is None
    assert read_engine_metrics(VLLM.replace(b'"True"', b'"False"')).prefix_caching is False
    assert read_engine_metrics(VLLM.replace(b" 3.0", b" nan")).requests == 9
