"""The demo model in bfloat16: close to one process, and right about pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from epd_portable.demo.pictures import HELD_OUT_SEEDS, QUESTIONS, Picture, QuestionKind, draw
from epd_portable.envs import EPD_RUN_ID
from tests.e2e.asking import ask, assert_close, body, post, text
from tests.e2e.cases import SINGLE
from tests.e2e.engines import shared_memory, wait_until
from tests.e2e.two_encoders.deployment import Deployment


@pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
def test_an_answer_is_close_to_that_of_one_process(deployment: Deployment, content: Any) -> None:
    split, reference = (
        ask(deployment.split.url, content),
        ask(deployment.pair.reference_url, content),
    )
    assert_close(split, reference)
    assert {(item["source"], item["path"]) for item in split.items} <= {("transfer", "tcp")}


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
def test_description_is_exact_for_95_percent_of_images(deployment: Deployment, count: int) -> None:
    asked = [
        (draw(seed), kind)
        for seed in HELD_OUT_SEEDS[:count]
        for kind in (QuestionKind.DESCRIBE, QuestionKind.COUNT)
    ]

    def answered(picture: Picture, kind: QuestionKind) -> Any:
        shown = {"type": "image_url", "image_url": {"url": picture.data_url()}}
        response = post(deployment.split.url, body([shown, text(QUESTIONS[kind])]))
        return response.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(answered, *zip(*asked, strict=True))
        expected = [picture.scene.answer(kind) for picture, kind in asked]
        wrong = [pair for pair in zip(answers, expected, strict=True) if pair[0] != pair[1]]
    assert len(wrong) <= 0.05 * len(asked), wrong[:10]


def test_killed_launcher_leaves_no_process_port_or_memory(deployment: Deployment) -> None:
    """Runs last: nothing is left to test after it."""
    launcher = psutil.Process(deployment.split.pid)
    family = launcher.children(recursive=True)
    ports = {
        connection.laddr.port
        for process in family
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    shared = shared_memory(family)
    assert any(path.name.startswith("epd-") for path in shared)
    assert len(family) >= 4
    assert len(ports) >= 3
    (run_id,) = {runs_for(each) for each in family} - {""}
    launcher.kill()
    wait_until(lambda: not any(map(alive, family)), "every process has ended")
    wait_until(lambda: not any(path.exists() for path in shared), "shared memory is removed")
    # Other tests may be given the same ports by now.
    assert run_id not in {runs_for(each) for each in listeners(ports)}


def listeners(ports: set[int]) -> Iterator[psutil.Process]:
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
        if listens and connection.pid is not None:
            with contextlib.suppress(psutil.Error):
                yield psutil.Process(connection.pid)


def runs_for(process: psutil.Process) -> str:
    """Return the run that a process belongs to; empty if it has ended, or belongs to none."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get(EPD_RUN_ID.name, "")
    return ""


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
