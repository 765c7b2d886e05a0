"""Clocks that jump: the wall clock in every process, and a monotonic one that leaps."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from tests.faults.ends import FAST, Close, addresses, consumer, producer, settle
from tests.faults.points import ENCODER_WORKER, LAUNCHER
from tests.faults.topology import ROOT, Topology
from tests.faults.traffic import check, quiet, requests, send
from tests.kit.encode_side import order, output

REQUESTS = 8
WALL_CLOCK = {"time", "time_ns", "now", "utcnow"}
ASKS_THE_WALL_CLOCK = {
    "config/secret.py": "a signed request is good for half a minute",
    "transfer/stores/file.py": "files of a folder are as old as their change times say",
    "transfer/stores/redis.py": "entries expire by a clock that all writers share",
    "launch/commands/command_line.py": "events for programs say when they were",
    "launch/run/supervisor.py": "files older than the run are not its own, by their change times",
    "engine/hub.py": "requests of vLLM say when they came",
    "front/http.py": "its access line says when a request came",
}


def test_wall_clock_decides_ages_and_dates_only() -> None:
    package = ROOT / "epd_portable"
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in WALL_CLOCK
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime")
            ):
                found.add(str(path.relative_to(package)))
    assert found <= set(ASKS_THE_WALL_CLOCK)


def test_topology_works_under_wall_clock_jumps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every call of ``time.time`` is up to a day wrong, in another way each time.

    The launcher is killed while requests are under way: its guard leaves nothing.
    """
    folder = tmp_path_factory.mktemp("clock") / "run"
    topology = Topology(
        folder, encoders=("shm",), prefills=("shm",), env={"EPD_TEST_CLOCK": "jumps"}
    )
    try:
        topology.faults.arm("transfer.begun", ENCODER_WORKER)
        asked = requests("clock", 1, REQUESTS)
        check(asked, send(topology, asked), failures=False)
        assert topology.faults.struck()
        topology.until(topology.recovered, "a new encoder serves")
        asked = requests("clock", 2, REQUESTS)
        check(asked, send(topology, asked), failures=False)
        topology.until_empty(lambda: quiet(topology))
        topology.faults.arm("item.landed", LAUNCHER)
        asked = requests("clock", 3, REQUESTS)
        check(asked, send(topology, asked), failures=True, broken=True)
        assert topology.faults.struck()
        topology.until(topology.nothing_left, "the guard has ended everything")
    finally:
        topology.close()


@pytest.mark.parametrize("path", ["shm", "tcp", "collective", "nixl"])
def test_leaping_monotonic_clock_ends_leases_and_loses_nothing(
    tmp_path: Path, close: Close, path: str
) -> None:
    """The clock leaps, as after a machine was asleep: every deadline has passed at once."""
    leap_s = 0.0
    address, _ = addresses(tmp_path)
    pd = consumer(path, address, close, clock=lambda: time.monotonic() + leap_s)
    sender = producer(path, close)
    names = [f"leap-{number}" for number in range(4)]
    for name in names:
        pd.arrive(name, name, 60)
        sender.submit(order(f"t-{name}", name, address, 60), None)
    pd.step_until(lambda: all(pd.granted(f"t-{name}") for name in names))
    leap_s = 100 * FAST["wait_timeout_s"]
    pd.step()
    assert pd.served() == dict.fromkeys(names, "local")
    for name in names:
        sender.output_ready(name, output(name, 60))
    settle(pd, sender)
    pd.arrive("late", "late", 60)
    sender.submit(order("t-late", "late", address, 60), output("late", 60))
    pd.step_until(lambda: "late" in pd.encoder_cache)
    assert pd.served() == {"late": "transfer"}
    settle(pd, sender)
