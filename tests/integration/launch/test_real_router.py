"""The launcher with the router, in front of engines that are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.run.router_client import RouterClient
from tests.integration.launch.conftest import Asked, Run, complete

PDS = ("pd-0", "pd-1")


@pytest.fixture
def run(routed: Callable[..., Run]) -> Run:
    """Two prefill-decode instances."""
    run = routed({name: [] for name in PDS})
    return run


def test_an_update_under_load_loses_nothing(run: Run) -> None:
    before = {name: run.pid_of(name) for name in (*PDS, "router")}
    end = threading.Event()
    answers: list[dict[str, Any]] = []

    def keep_asking() -> None:
        while not end.is_set():
            answers.append(complete(run, 0.2))

    clients = [threading.Thread(target=keep_asking) for _ in range(4)]
    for client in clients:
        client.start()
    run.process.send_signal(signal.SIGHUP)
    try:
        run.wait_for("updated pd-0, pd-1")
        time.sleep(1.0)
    finally:
        end.set()
        for client in clients:
            client.join()
    assert [answer for answer in answers if "error" in answer] == []
    after = {name: run.pid_of(name) for name in before}
    assert after["router"] == before["router"]
    pids = {pids[name] for pids in (before, after) for name in PDS}
    assert len(pids) == 4
    assert {answer["pid"] for answer in answers} == pids
    assert not any("warning" in line for line in run.lines)


def test_an_open_request_is_answered_after_the_stop_signal(run: Run) -> None:
    asked = Asked(run, 3.0)
    # As a terminal does it: every process of the launcher's group, and no other.
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait_for("open requests may take 30 s to end (router.drain_s)")
    assert "pid" in asked.ended()
    run.ends_well()


def test_instances_of_another_launcher_join_are_updated_and_leave(
    routed: Callable[..., Run], launch: Callable[..., Run], tmp_path: Path
) -> None:
    there = routed({"pd-0": []}, router={"registration": True})
    url, name = f"http://127.0.0.1:{there.ports['router']}", "pd-7"
    router = RouterClient(url, there.secret)
    joining = {"joins": [url], "secret": (tmp_path / "secret").read_text().strip()}
    here = launch({name: []}, **joining)
    assert any(f"{name} has joined {url}" in line for line in here.lines)
    assert router.find_instance(name)[1]["state"] == "up"
    here.process.send_signal(signal.SIGHUP)
    here.wait_for(f"updated {name}")
    # One that hangs, and is removed for that, joins again when it answers.
    pid = here.pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    router.leave(name, timeout_s=60)
    here.wait_for(f"{name}: router {url} has removed it")
    os.kill(pid, signal.SIGCONT)
    here.wait_for(f"{name} has joined {url}")
    # What it works on ends before it does.
    here.until(lambda: router.find_instance(name)[1]["state"] == "up", "it is up")
    asked = [Asked(there, 3.0) for _ in range(2)]
    here.until(lambda: all(each["in_flight"] for each in router.instances()), "each has one")
    here.stop()
    assert {each.ended()["pid"] for each in asked} == {pid, there.pid_of("pd-0")}
    assert f"{name} has left {url}" in here.all_lines()
    assert router.find_instance(name)[1] is None
    # Without a router it is not ready, and says so.
    there.stop()
    here = launch({name: []}, **joining, startup_timeout_s=2.0, until="cannot be reached")
    here.process.send_signal(signal.SIGHUP)
    here.wait_for("no update while the topology starts")
    here.wait_for("failed:")
    assert f"instances are not up at {url} after 2 s (launch.startup_timeout_s)" in here.lines[-1]
    assert f"{name}: router {url} cannot be reached" in here.lines[-1]
    assert any(f"{name}: router {url} cannot be reached" in line for line in here.lines)
    here.ends_well(1)


@pytest.mark.parametrize(
    ("networks", "secret", "reason"),
    [
        (["10.0.0.0/8"], "", "is in no network of router.instance_networks (10.0.0.0/8)"),
        (["loopback"], "1" * 64, "made with another secret_file than this router's"),
    ],
    ids=["network", "secret"],
)
def test_launcher_ends_with_the_reason_when_a_router_refuses_for_good(
    routed: Callable[..., Run],
    launch: Callable[..., Run],
    tmp_path: Path,
    networks: list[str],
    secret: str,
    reason: str,
) -> None:
    there = routed({"pd-0": []}, router={"registration": True, "instance_networks": networks})
    url = f"http://127.0.0.1:{there.ports['router']}"
    shared = secret or (tmp_path / "secret").read_text().strip()
    here = launch({"pd-7": []}, joins=[url], secret=shared, until="failed:")
    assert f"pd-7 cannot join: router {url}: " in here.lines[-1]
    assert reason in here.lines[-1]
    here.ends_well(1)


def test_launcher_reports_a_refusal_that_can_heal_and_waits_for_it(
    routed: Callable[..., Run], launch: Callable[..., Run], tmp_path: Path
) -> None:
    there = routed({"pd-0": [], "pd-1": []}, router={"registration": True})
    url = f"http://127.0.0.1:{there.ports['router']}"
    shared = (tmp_path / "secret").read_text().strip()
    here = launch({"pd-0": []}, joins=[url], secret=shared, until="pd-0: joins its routers: ")
    assert f"instance 'pd-0' is at {there_url(there)} and healthy: take another" in here.lines[-1]
    RouterClient(url, there.secret).leave("pd-0", timeout_s=60)
    here.wait_for("ready:")
    here.stop()


def there_url(run: Run) -> str:
    return f"http://127.0.0.1:{run.ports['pd-0']}"


def test_a_router_alone_is_ready_before_instances_join(tmp_path: Path) -> None:
    secret, port = tmp_path / "secret", port_source("0000003b")()
    make_secret_file(str(secret))
    settings = [f"secret_file={secret}", "instances.encode.count=0"]
    settings += ["instances.prefill_decode.count=0"]
    command = [sys.executable, "-m", "epd_portable.launch.cli", "--platform", "cuda"]
    command += ["--config", "configs/1e1pd.yaml", "--port", str(port)]
    command += [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("ready:")):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        assert "no instances of its own" in lines[-1]
        health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30, trust_env=False)
        assert health.status_code == 503
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
