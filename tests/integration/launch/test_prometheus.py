"""A real Prometheus reads a running topology, by the configuration that ``status`` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from epd_portable.launch.plan.ports import port_source
from tests.integration.launch.conftest import DEADLINE_S, Run
from tests.integration.launch.test_real_router import run  # noqa: F401 - a fixture

EVERY = "200ms"

pytestmark = pytest.mark.needs_prometheus


class Prometheus:
    """What a server of Prometheus answers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?query="

    def values(self, query: str) -> dict[tuple[str, ...], float]:
        """Return values by job, instance and role."""
        url = self._url + urllib.parse.quote(query)
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                found = json.loads(answer.read())["data"]["result"]
        except OSError:
            return {}
        names = ("job", "instance", "role")
        return {
            tuple(each["metric"].get(name, "") for name in names): float(each["value"][1])
            for each in found
        }


@pytest.fixture
def prometheus(run: Run, tmp_path: Path) -> Iterator[Prometheus]:  # noqa: F811
    printed = subprocess.run(
        [Path(sys.executable).parent / "epd-launch", "status", "--prometheus"],
        env={**os.environ, "TMPDIR": str(run.temp_dir.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    ).stdout
    config = tmp_path / "prometheus.yaml"
    settings = {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY},
        **yaml.safe_load(printed),
    }
    config.write_text(yaml.safe_dump(settings), "utf-8")
    port = port_source("0000005c")()
    with (tmp_path / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port)
    finally:
        server.kill()
        server.wait()


def test_it_reads_router_and_instances_and_calls_them_by_their_names(
    run: Run,  # noqa: F811
    prometheus: Prometheus,
) -> None:
    router = ("epd-router", f"127.0.0.1:{run.ports['router']}", "")
    instances = {("epd-instances", name, "prefill-decode") for name in ("pd-0", "pd-1")}
    run.until(
        lambda: prometheus.values("up") == dict.fromkeys({router, *instances}, 1.0),
        "all are read",
    )
    seen = {("epd-router", name, "prefill-decode"): 1.0 for name in ("pd-0", "pd-1")}
    run.until(lambda: prometheus.values("epd_router_instance_up") == seen, "both are up")
