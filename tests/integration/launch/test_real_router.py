"""The launcher with the real router, in front of engines that are stand-ins."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.plan.ports import port_source
from epd_portable.router.settings import RouterSettings
from tests.integration.launch.conftest import Options

pytestmark = pytest.mark.skipif(
    "drain_s" not in RouterSettings.model_fields, reason="this router does not drain"
)
Launch = Callable[..., Any]
PDS = ("pd-0", "pd-1")


@pytest.fixture
def run(launch: Launch, tmp_path: Path) -> Any:
    """Two prefill-decode instances behind a router that registers nobody."""
    secret_file = tmp_path / "secret"
    make_secret_file(str(secret_file))

    def router(ports: dict[str, int]) -> list[str]:
        control = port_source("0000002a")
        settings = {
            "port": ports["router"],
            "model": "demo",
            "instances": [
                {
                    "name": name,
                    "role": "prefill-decode",
                    "url": f"http://127.0.0.1:{ports[name]}",
                    "control": f"tcp://127.0.0.1:{control()}",
                }
                for name in PDS
            ],
            "secret_file": str(secret_file),
            "registration": False,
            "drain_s": 30.0,
            "probe_interval_s": 0.1,
        }
        return ["-m", "epd_portable.router", "--settings", json.dumps(settings)]

    servers: dict[str, Options] = {name: [] for name in PDS}
    run = launch({**servers, "router": router}, secret=secret_file.read_text().strip())
    run.wait_for("ready:")
    return run


def ask(run: Any, tokens: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "x", "max_tokens": tokens}
    try:
        answer: dict[str, Any] = json.loads(run.ask("router", "/v1/completions", body))
        return answer
    except OSError as error:
        return {"error": repr(error)}


def test_an_update_under_load_loses_nothing(run: Any) -> None:
    before = {name: run.pid_of(name) for name in (*PDS, "router")}
    end = threading.Event()
    answers: list[dict[str, Any]] = []

    def keep_asking() -> None:
        while not end.is_set():
            answers.append(ask(run, 20))

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


def test_an_open_request_is_answered_after_the_stop_signal(run: Any) -> None:
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(ask(run, 150)))
    client.start()
    time.sleep(0.5)
    assert run.stop(signal.SIGTERM) == 0
    client.join()
    assert "error" not in answers[0]
    assert run.nothing_left()
