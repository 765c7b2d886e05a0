"""Real engines: SIGKILL for every process of the topology, and clients that go away.

All of it needs ``--full``: an engine takes most of a minute to start again. `tests/e2e` kills
an encoder and the launcher of real engines every time.
"""

from __future__ import annotations

import base64
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw
from epd_portable.wire.params import FIELD
from tests.e2e.asking import body, picture, post, text
from tests.e2e.conftest import ROOT, Split, every_instance_is_up, forget, running
from tests.e2e.engines import RESTART_S, metric, wait_until
from tests.faults.leaving import ask_and_leave
from tests.faults.placed import count_placed
from tests.faults.points import (
    ENCODER_SCHEDULER,
    ENCODER_WORKER,
    FRONT,
    LAUNCHER,
    PD_SCHEDULER,
    PD_WORKER,
    POINTS,
    Faults,
    Victim,
)
from tests.faults.traffic import LOST
from tests.kit.fronts import killed
from tests.kit.shm import small_disk

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]

WAIT_S, LEASE_S = 8.0, 2.0
DEADLINE_S = 60.0
"""Seconds for a request: two attempts, each with a wait for its items, on a busy machine."""
IDLE = (
    ("ec_producer", "vllm:num_requests_running"),
    ("ec_producer", "vllm:num_requests_waiting"),
    ("ec_producer", "epd_encode_transfers_in_flight"),
    ("ec_consumer", "vllm:num_requests_waiting"),
    ("ec_consumer", "epd_pd_transfers_in_flight"),
    ("ec_consumer", "epd_pd_transfers_waiting"),
    ("ec_consumer", "epd_pd_encoder_cache_held_embeddings"),
)
"""Gauges that are zero when nothing is under way."""
NAMES = ("encode-0", "prefill_decode-0")
ASK = text("What is in the picture?")
CONTENTS: list[Any] = [
    [picture(seed), picture(seed + 1), ASK] if seed % 4 == 0 else [picture(seed), ASK]
    for seed in range(500, 512, 2)
]
FIRST = ("encode_job", "transfer.begun", "item.landed")
"""Points at which every victim is struck, where there is no time for all points."""
CASES = [
    pytest.param(victim, point)
    for point in sorted(POINTS, key=lambda point: point not in FIRST)
    for victim in (ENCODER_WORKER, ENCODER_SCHEDULER, PD_WORKER, PD_SCHEDULER, FRONT)
]
LOG_BYTES = 8192
REQUESTS, LEAVING, AT_ONCE, LONGEST_PATIENCE_S = 1000, 100, 24, 1.0


class Engines:
    """A topology whose scheduler and workers are processes of their own, and its right answers."""

    def __init__(self, split: Split, faults: Faults) -> None:
        self.split = split
        self.faults = faults
        faults.know("launcher", split.pid)
        self.right = [self.ask(content) for content in CONTENTS]
        assert all(status == 200 for status, _ in self.right), self.right
        assert count_placed(split.trace_dir), "nothing was delivered"
        self.processes = self.count()

    def ask(self, content: Any, *, max_tokens: int = 8) -> tuple[int, str]:
        """Return status and text of an answer; status 0 if the connection broke."""
        try:
            answer = httpx.post(
                f"{self.split.url}/v1/chat/completions",
                json=body(content, max_tokens=max_tokens),
                timeout=DEADLINE_S,
                trust_env=False,
            )
        except httpx.TimeoutException as error:
            raise AssertionError(f"no end within {DEADLINE_S:g} s") from error
        except httpx.RequestError as error:
            return 0, repr(error)
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]["message"]
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "abort":
            # vLLM ends open responses so when its server is stopped.
            return 0, "ended by abort"
        return 200, choice["message"]["content"]

    def ask_all(self) -> list[tuple[int, str]]:
        """Ask every question at once."""
        with ThreadPoolExecutor(len(CONTENTS)) as pool:
            return list(pool.map(self.ask, CONTENTS))

    def forget(self) -> None:
        """Empty every cache, so that the questions have to be encoded and computed again."""
        forget(self.split, "prefix_cache", "mm_cache", "encoder_cache")

    def servers(self) -> set[int]:
        """Return the processes that the launcher has started: engines, front and guard."""
        return {process.pid for process in psutil.Process(self.split.pid).children()}

    def back(self, before: set[int]) -> bool:
        """Return whether a process has replaced a killed one, and all serve and get requests."""
        servers = self.servers()
        if servers == before or len(servers) < len(before):
            return False
        with suppress(httpx.RequestError):
            for name in NAMES:
                url = f"{self.split.url}/epd/instances/{name}/health"
                if not httpx.get(url, timeout=10, trust_env=False).is_success:
                    return False
            seen = httpx.get(f"{self.split.url}/health", timeout=10, trust_env=False).json()
            return bool(seen["counts"]["up"] == sum(seen["counts"].values()))
        return False

    def left(self) -> list[str]:
        """Return what instances still keep besides cached items; the text lets them step."""
        assert self.ask("hello")[0] == 200
        left = [f"{name} of {role}" for role, name in IDLE if metric(self.split.pid, role, name)]
        return left + [f"{self.count()} processes"] * (self.count() != self.processes)

    def pool_is_empty(self) -> bool:
        """Return whether every slot is free, after the encoder cache was emptied."""
        assert self.ask("hello")[0] == 200
        return metric(self.split.pid, "ec_consumer", "epd_pd_pool_used_bytes") == 0

    def check_nothing_is_left(self) -> None:
        """Wait until nothing is kept."""
        wait_until(lambda: not self.left(), "nothing is kept")
        self.forget()
        wait_until(self.pool_is_empty, "the pool is empty")

    def count(self) -> int:
        """Return the number of processes under the launcher."""
        return len(psutil.Process(self.split.pid).children(recursive=True))


@contextmanager
def started(folder: Path, **more: str) -> Iterator[Engines]:
    """Start engines with these variables in every process."""
    faults = Faults(folder / "faults")
    settings = [
        "engine_args.dtype=float32",
        "engine_args.distributed_executor_backend=mp",
        f"transfer.wait_timeout_s={WAIT_S}",
        f"transfer.lease_s={LEASE_S}",
    ]
    env = {
        **faults.environment,
        "PYTHONPATH": f"{Faults.HOOKS}:{ROOT}",
        "VLLM_SERVER_DEV_MODE": "1",
        **more,
    }
    with running(folder, settings, env=env) as split:
        yield Engines(split, faults)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with started(tmp_path_factory.mktemp("engines")) as found:
        yield found


def test_real_engines_work_under_wall_clock_jumps(tmp_path: Path) -> None:
    """Every call of ``time.time`` is up to a day wrong, in vLLM too."""
    question, seeds = QuestionKind.DESCRIBE, range(900, 904)
    with started(tmp_path, EPD_TEST_CLOCK="jumps") as engines:
        for seed in seeds:
            reply = engines.ask([picture(seed), text(QUESTIONS[question])], max_tokens=24)
            assert reply == (200, draw(seed).scene.answer(question))
        engines.forget()
        servers = engines.servers()
        engines.faults.arm("transfer.begun", ENCODER_WORKER)
        assert engines.ask_all() == engines.right
        assert engines.faults.struck()
        wait_until(lambda: engines.back(servers), "a new encoder serves", within_s=RESTART_S)
        engines.forget()
        placed = count_placed(engines.split.trace_dir)
        assert engines.ask_all() == engines.right
        assert count_placed(engines.split.trace_dir) > placed
        engines.check_nothing_is_left()


def test_full_disk_under_logs_costs_no_response(tmp_path: Path) -> None:
    """The disk is full when the front and the engines start, which then log nothing."""
    logs, question = tmp_path / "logs", QuestionKind.DESCRIBE
    logs.mkdir()
    before = small_disk(logs, LOG_BYTES)

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*before, *command], **options)

    def describe(seed: int) -> None:
        asked = body([picture(seed), text(QUESTIONS[question])], max_tokens=24)
        reply = post(split.url, asked).json()
        assert reply["choices"][0]["message"]["content"] == draw(seed).scene.answer(question)
        assert [item["source"] for item in reply[FIELD]["items"]] == ["transfer"]

    with running(tmp_path, [], popen=popen) as split:
        assert os.statvfs(f"/proc/{split.pid}/root{logs}").f_bavail == 0
        describe(910)
        with killed(split, "encode-0"):
            pass
        wait_until(lambda: every_instance_is_up(split), "items are sent to the new one")
        describe(911)


@pytest.mark.parametrize(("victim", "point"), CASES, ids=str)
def test_a_killed_process_costs_no_wrong_answer(
    engines: Engines, victim: Victim, point: str
) -> None:
    engines.forget()
    nth = random.Random(f"engines/{victim}/{point}").randint(1, 3)
    servers = engines.servers()
    engines.faults.arm(point, victim, nth=nth)
    replies = engines.ask_all()
    assert engines.faults.struck(), f"{point} was not passed"
    for reply, right in zip(replies, engines.right, strict=True):
        lost = reply[0] == LOST or (victim is FRONT and reply[0] == 0)
        assert reply == right or (victim.role != "encode-" and lost and reply[1]), reply
    wait_until(lambda: engines.back(servers), f"a new {victim} serves", within_s=RESTART_S)
    engines.forget()
    assert engines.ask_all() == engines.right
    engines.check_nothing_is_left()


def test_tenth_of_1000_clients_disconnects_and_others_are_served(engines: Engines) -> None:
    chance = random.Random("engines/aborts")
    pool = [picture(seed, size=56) for seed in range(600, 640)]
    right = [engines.ask([part, ASK]) for part in pool]
    assert all(status == 200 for status, _ in right), right
    asked = []
    for number in range(REQUESTS):
        place = chance.randrange(len(pool))
        request = body([item_of_its_own(pool[place], number), ASK], max_tokens=8)
        asked.append((request, right[place][1]))
    leaving = chance.sample(range(REQUESTS), LEAVING)
    before = count_placed(engines.split.trace_dir)
    outcome = ask_and_leave(
        engines.split.url,
        asked,
        {number: chance.uniform(0.0, LONGEST_PATIENCE_S) for number in leaving},
        at_once=AT_ONCE,
        deadline_s=DEADLINE_S,
    )
    assert outcome.wrong == []
    # The faster a machine is, the more are answered before they have gone.
    assert outcome.left > LEAVING / 5
    placed = count_placed(engines.split.trace_dir) - before
    assert placed > REQUESTS / 2, "most items were not transferred"
    engines.check_nothing_is_left()


def item_of_its_own(part: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a picture that looks the same and is another item: bytes after its end differ."""
    head, _, data = part["image_url"]["url"].partition(",")
    png = base64.b64decode(data) + number.to_bytes(2, "big")
    return {"type": "image_url", "image_url": {"url": f"{head},{base64.b64encode(png).decode()}"}}


def test_a_killed_launcher_leaves_no_process(engines: Engines) -> None:
    """Runs last: nothing is left to test after it."""
    engines.forget()
    family = psutil.Process(engines.split.pid).children(recursive=True)
    engines.faults.arm("item.landed", LAUNCHER)
    for reply, right in zip(engines.ask_all(), engines.right, strict=True):
        assert reply == right or reply[0] in (0, LOST), reply
    assert engines.faults.struck()
    wait_until(lambda: not any(map(_alive, family)), "every process has ended")


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
