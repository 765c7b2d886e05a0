from __future__ import annotations

from epd_portable.router.observability.engine_figures import EngineFigures, read_figures


def test_engines_of_one_instance_are_added_up_and_the_fullest_cache_counts() -> None:
    page = b"""
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} 7"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1e+01
vllm:num_requests_waiting_by_reason{engine="0"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""
    assert read_figures(page) == EngineFigures(running=4, waiting=10, kv_used=0.5)


def test_bytes_are_told_by_path() -> None:
    page = b"""epd_pd_received_bytes_total{path="shm"} 4096.0
epd_pd_received_bytes_total{path="tcp"} 1.5e+06
epd_pd_received_bytes_created{path="tcp"} 1.7e+09
"""
    assert read_figures(page).received_bytes == {"shm": 4096, "tcp": 1_500_000}


def test_an_encode_instance_tells_its_items() -> None:
    assert read_figures(b"epd_encode_queued_items 3.0\n").queued_items == 3


def test_what_is_no_number_of_ours_is_left_out() -> None:
    for page in (
        b"",
        b"\xff\xfe\n",
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running{ 3.0\n",
        b'# epd_pd_received_bytes_total{path="shm"} 4096.0\n',
    ):
        assert read_figures(page) == EngineFigures()
    hostile = b'epd_pd_received_bytes_total{path="<img src=x>"} 1.0\n'
    assert read_figures(hostile).received_bytes == {"": 1}
