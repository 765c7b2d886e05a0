"""`epd-bench store` without engines: a real receiver, files, and a server where there is one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from epd_portable.bench import store
from epd_portable.bench.cli import main


def run(tmp_path: Path, *arguments: str) -> dict[str, list[dict[str, float]]]:
    page = tmp_path / "store.json"
    words = ["store", "--bytes", "64KiB", "--repeat", "3", "--json", str(page), *arguments]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert not list(Path("/dev/shm").glob(f"epd-bench-{os.getpid()}-*"))
    found: dict[str, list[dict[str, float]]] = json.loads(page.read_text())
    return found


def test_items_are_written_asked_for_and_loaded(tmp_path: Path) -> None:
    data = run(tmp_path, "--kind", "file")
    assert [(row["kind"], row["nbytes"]) for row in data["summary"]] == [("file", 65536)]
    assert len(data["samples"]) == store.TURNS, "at least as many as are asked for, in turns"
    assert all(0 < each[name] < 60 for each in data["samples"] for name in ("save_s", "ready_s"))


@pytest.mark.needs_redis
def test_a_server_is_started_and_compared_with_its_own_benchmark(tmp_path: Path) -> None:
    if shutil.which("redis-benchmark") is None:
        pytest.skip("redis-benchmark is not on PATH")
    [row] = run(tmp_path, "--kind", "redis")["summary"]
    assert row["get_ratio"] > 0 and row["set_ratio"] > 0
