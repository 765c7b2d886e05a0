"""Metrics of several processes on one page, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from epd_portable.vllm_plugin.exposition import FolderCollector
from tests import warm

WORKER = """
import sys
from epd_portable.vllm_plugin import exposition
exposition.serve()
exposition.publish()
exposition.publish()
from prometheus_client import Counter, Gauge
from epd_portable.items.metrics import SenderMetrics
metrics = SenderMetrics()
metrics.transfers.labels("cache").inc()
metrics.in_flight.inc()
Counter("vllm:something", "of the engine").inc()
if sys.argv[1:]:
    print("counted", flush=True)
    sys.stdin.read()
"""
SERVER = """
import os, sys
import prometheus_client
from epd_portable.vllm_plugin import exposition
exposition.serve()
exposition.serve()
assert not os.path.exists(os.environ["EPD_METRICS_DIR"]), "nothing is published yet"
prometheus_client.generate_latest()
print(os.environ["EPD_METRICS_DIR"], flush=True)
sys.stdin.readline()
prometheus_client.Counter("vllm:requests", "of the server").inc()
print(prometheus_client.generate_latest().decode())
"""
TIMEOUT_S = 300


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path)}


def test_page_sums_series_of_processes_and_leaves_no_folder(
    environ: dict[str, str], tmp_path: Path
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = warm.nursery().popen("-c", SERVER, env=environ, **pipes)
    assert server.stdin and server.stdout
    of_engine = {**environ, "EPD_METRICS_DIR": server.stdout.readline().strip()}
    ended = warm.nursery().run("-c", WORKER, env=of_engine, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    worker = warm.nursery().popen("-c", WORKER, "stay", env=of_engine, **pipes)
    assert worker.stdin and worker.stdout and worker.stdout.readline() == "counted\n"
    server.stdin.write("\n")
    server.stdin.close()
    lines = server.stdout.read().splitlines()
    worker.stdin.close()
    assert [worker.wait(TIMEOUT_S), server.wait(TIMEOUT_S)] == [0, 0]
    for each in (worker.stdout, server.stdout):
        each.close()
    begun = 'epd_encode_transfers_total{source="cache"} 2.0'
    assert lines.count(begun) == 1, "one collector of several calls"
    assert "epd_encode_transfers_in_flight 1.0" in lines, "of the process that runs"
    assert 'epd_encode_transfers_total{source="encoder"} 0.0' in lines
    assert "vllm:requests_total 1.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert not any("something" in line for line in lines), "not ours, and not shown before"
    assert list(tmp_path.iterdir()) == []


def test_ended_processes_leave_one_file_of_each_kind(
    environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "metrics"
    for count in (1, 2, 3):
        of_engine = {**environ, "EPD_METRICS_DIR": str(folder)}
        ended = warm.nursery().run("-c", WORKER, env=of_engine, timeout=TIMEOUT_S)
        assert ended.returncode == 0, ended.stderr
        samples = [each for metric in FolderCollector(folder).collect() for each in metric.samples]
        values = {(each.name, each.labels.get("source")): each.value for each in samples}
        assert values["epd_encode_transfers_total", "cache"] == count
        assert ("epd_encode_transfers_in_flight", None) not in values
        names = {path.name for path in folder.glob("*.db")}
        assert names == {"counter_ended.db"}


def test_folder_that_vllm_serves_is_used_instead(environ: dict[str, str], tmp_path: Path) -> None:
    # The library reads the variable when it is imported.
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", WORKER], env=environ, timeout=TIMEOUT_S, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    counted = 'epd_encode_transfers_total{source="cache"} 1.0'
    assert counted in generate_latest(registry).decode().splitlines()


def test_process_without_page_of_its_engine_counts_for_itself(
    environ: dict[str, str], tmp_path: Path
) -> None:
    program = WORKER.replace("exposition.serve()", "")
    ended = warm.nursery().run("-c", program, env=environ, timeout=TIMEOUT_S)
    assert "VLLM_PLUGINS" in ended.stderr and ended.returncode == 0
    assert list(tmp_path.iterdir()) == []
