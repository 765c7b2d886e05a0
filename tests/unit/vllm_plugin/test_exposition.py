"""Metrics of several processes on one page, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
SERVER = f"""
import os, subprocess, sys
import prometheus_client
from epd_portable.vllm_plugin import exposition
exposition.serve()
exposition.serve()
assert not os.path.exists(os.environ["EPD_METRICS_DIR"]), "nothing is published yet"
prometheus_client.generate_latest()
subprocess.run([sys.executable, "-c", {WORKER!r}], check=True)
command = [sys.executable, "-c", {WORKER!r}, "stay"]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdout.readline()
mine = prometheus_client.Counter("vllm:requests", "of the server")
mine.inc()
print(prometheus_client.generate_latest().decode())
worker.communicate()
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path)}


def run(environ: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def page(environ: dict[str, str], program: str = SERVER) -> list[str]:
    return run(environ, program).stdout.splitlines()


def test_page_sums_series_of_processes_and_keeps_its_own(
    environ: dict[str, str],
) -> None:
    lines = page(environ)
    begun = 'epd_encode_transfers_total{source="cache"} 2.0'
    assert lines.count(begun) == 1, "one collector, however often asked"
    assert "epd_encode_transfers_in_flight 1.0" in lines, "of the process that runs"
    assert 'epd_encode_transfers_total{source="encoder"} 0.0' in lines
    assert "vllm:requests_total 1.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert not any("something" in line for line in lines), "not ours, and not shown before"


def test_the_folder_goes_with_the_first_process(environ: dict[str, str], tmp_path: Path) -> None:
    page(environ)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vllm_serves_by_itself_is_used_instead(
    environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "several"
    folder.mkdir()
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    page(environ, WORKER)
    lines = page(
        environ,
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n",
    )
    assert 'epd_encode_transfers_total{source="cache"} 1.0' in lines


def test_process_without_page_of_its_engine_counts_for_itself(
    environ: dict[str, str], tmp_path: Path
) -> None:
    assert "VLLM_PLUGINS" in run(environ, WORKER.replace("exposition.serve()", "")).stderr
    assert list(tmp_path.iterdir()) == []
