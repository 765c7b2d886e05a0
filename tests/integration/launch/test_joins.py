"""A launcher whose engines join a front elsewhere; the front and the engines are stand-ins."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epd_portable.launch.run.fronts import FrontClient
from tests.integration.launch.conftest import Asked, Run, client_of, in_flight


def find(front: FrontClient, name: str) -> dict[str, Any]:
    """Return what a front reports of an instance; empty if it does not have it."""
    return next((each for each in asyncio.run(front.instances()) if each["name"] == name), {})


def test_instances_of_another_launcher_join_and_leave(
    routed: Callable[..., Run], launch: Callable[..., Run], tmp_path: Path
) -> None:
    there = routed({"pd-0": []})
    url, name = f"http://127.0.0.1:{there.ports['front']}", "pd-7"
    front = client_of(there)
    joining = {"joins": [url], "secret": (tmp_path / "secret").read_text().strip()}
    here = launch({name: []}, **joining)
    assert any(f"{name} has joined {url}" in line for line in here.lines)
    assert find(front, name)["state"] == "up"
    # What it works on ends before it does.
    pids = {there.pid_of("pd-0"), here.pid_of(name)}
    asked = [Asked(there) for _ in range(2)]
    here.process.send_signal(signal.SIGTERM)
    here.wait_for("open requests may take 30 s to end")
    assert in_flight(there) == 2
    for run, engine in ((there, "pd-0"), (here, name)):
        run.ask(engine, "/release")
    here.ends_well()
    assert {each.ended()["pid"] for each in asked} == pids
    assert f"{name} has left {url}" in here.all_lines()
    assert not find(front, name)


def test_launcher_ends_with_the_reason_of_a_final_refusal(
    routed: Callable[..., Run], launch: Callable[..., Run]
) -> None:
    there = routed({"pd-0": []})
    url = f"http://127.0.0.1:{there.ports['front']}"
    here = launch({"pd-7": []}, joins=[url], secret="1" * 64, until="failed:")
    assert f"pd-7 cannot join: front {url}: " in here.lines[-1]
    assert "it was made with another secret_file" in here.lines[-1]
    here.ends_well(1)


def test_launcher_reports_a_transient_refusal_and_waits(
    routed: Callable[..., Run], launch: Callable[..., Run], tmp_path: Path
) -> None:
    there = routed({"pd-0": [], "pd-1": []})
    url = f"http://127.0.0.1:{there.ports['front']}"
    shared = (tmp_path / "secret").read_text().strip()
    here = launch({"pd-0": []}, joins=[url], secret=shared, until="still waiting for pd-0 (front ")
    taken = f"instance 'pd-0' is at http://127.0.0.1:{there.ports['pd-0']} and healthy"
    assert f"{taken}: take another" in here.lines[-1]
    asyncio.run(client_of(there).request("DELETE", "/pd-0"))
    here.wait_for("ready:")
    here.stop()


def test_instance_of_another_environment_joins_its_front(
    routed: Callable[..., Run],
) -> None:
    run = routed({"pd-0": [], "other-1": []}, apart=["other-1"], pauses_s=(0.2, 0.8))
    url = f"http://127.0.0.1:{run.ports['front']}"
    assert any(line.endswith(f"other-1 has joined {url}") for line in run.lines)
    assert {each["name"] for each in asyncio.run(client_of(run).instances())} == {"pd-0", "other-1"}
    os.kill(run.pid_of("other-1"), signal.SIGKILL)
    run.wait_for("other-1 has recovered")
    os.kill(run.pid_of("front"), signal.SIGKILL)
    run.wait_for(f"other-1 has joined {url} again: the front has restarted")
    run.stop()
    # It ends with its front, after the front, and does not leave before.
    assert not any("has left" in line for line in run.all_lines())
