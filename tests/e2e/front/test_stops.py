"""An engine behind the front that stops (SIGSTOP), for a while or for good."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from epd_portable.items.transfers import LEASE_MARGIN_S
from tests.e2e.asking import ask, body, picture, post, text
from tests.e2e.conftest import ROOT, Split, running
from tests.e2e.engines import RESTART_S, process, wait_until
from tests.faults.points import ENCODER_WORKER, PD_WORKER, Faults, Victim
from tests.kit.fronts import in_flight, is_up

pytestmark = pytest.mark.full

ASK = text("Describe the picture.")
LEASE_S, WAIT_S = 1.0, 4.0
STOP_S = LEASE_S + LEASE_MARGIN_S + 0.5
HUNG_AFTER_S = 24.0
BOUND_S = 60.0
"""Longest time of a request whose engine stops for a while: more than a wait and a second try."""
EVENTS = ("encode.begin", "transfer.begun", "transfer.written", "item.landed", "item.placed")
POINTS = ("before", *EVENTS, "streaming")
NAMES = {ENCODER_WORKER: "encode-0", PD_WORKER: "prefill_decode-0"}


class Stopped:
    """A topology behind the front whose engines a test stops."""

    def __init__(self, split: Split, faults: Faults, reference_url: str) -> None:
        self.split = split
        self.faults = faults
        self.reference_url = reference_url
        self._seeds = iter(range(1000, 9999))

    def contents(self, count: int) -> list[list[dict[str, object]]]:
        """Return prompts with pictures that nobody has seen."""
        return [[picture(next(self._seeds)), ASK] for _ in range(count)]

    def pid(self, victim: Victim) -> int:
        return process(self.split.pid, NAMES[victim]).pid

    @contextmanager
    def at(self, victim: Victim, point: str) -> Iterator[list[Future[httpx.Response]]]:
        """Ask, and give the answers to come when a process has stopped at a point."""
        contents = self.contents(3)
        with ThreadPoolExecutor(len(contents)) as pool:

            def begin() -> list[Future[httpx.Response]]:
                self.asked = contents
                return [pool.submit(post, self.split.url, body(each)) for each in contents]

            if point == "before":
                os.kill(self.pid(victim), signal.SIGSTOP)
                yield begin()
            elif point == "streaming":
                request = body(contents[0], stream=True, max_tokens=300, ignore_eos=True)
                url = f"{self.split.url}/v1/chat/completions"
                with httpx.stream("POST", url, json=request, timeout=120, trust_env=False) as one:
                    lines = one.iter_lines()
                    next(lines)
                    os.kill(self.pid(victim), signal.SIGSTOP)
                    yield begin()
                    last = [line for line in lines if line][-1]
                assert last == "data: [DONE]" or '"error"' in last
            else:
                self.faults.arm(point, victim, signum=signal.SIGSTOP)
                answers = begin()
                wait_until(lambda: self.faults.struck() is not None, f"{victim} stops at {point}")
                yield answers

    def check(self, answers: list[Future[httpx.Response]], *, errors: bool) -> None:
        """Check that each is right, or a clear error if that may be, and that all serve on."""
        for content, each in zip(self.asked, answers, strict=True):
            reply = each.result(BOUND_S)
            if errors and reply.status_code != 200:
                assert reply.status_code == 503, reply.text
                assert reply.json()["error"]["message"]
                continue
            assert reply.status_code == 200, reply.text
            words = reply.json()["choices"][0]["logprobs"]["content"]
            expected = ask(self.reference_url, content)
            assert tuple(word["token"] for word in words) == expected.tokens
        (content,) = self.contents(1)
        assert ask(self.split.url, content).tokens == ask(self.reference_url, content).tokens
        wait_until(lambda: in_flight(self.split) == 0, "nothing is in flight")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, reference_url: str) -> Iterator[Stopped]:
    folder = tmp_path_factory.mktemp("stops")
    faults = Faults(folder / "faults")
    settings = [
        *("engine_args.dtype=float32", "launch.stop_grace_s=2"),
        *(f"transfer.lease_s={LEASE_S}", f"transfer.wait_timeout_s={WAIT_S}"),
        f"launch.hung_after_s={HUNG_AFTER_S}",
    ]
    env = {**faults.environment, "PYTHONPATH": f"{Faults.HOOKS}:{ROOT}"}
    # As users start it: hooks are installed when Python starts.
    with running(folder, settings, env=env, popen=subprocess.Popen) as split:
        yield Stopped(split, faults, reference_url)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", NAMES, ids=str)
def test_an_engine_that_stops_for_a_while_costs_no_answer(
    stopped: Stopped, victim: Victim, point: str
) -> None:
    with stopped.at(victim, point) as answers:
        pid = stopped.pid(victim)
        health = httpx.get(f"{stopped.split.url}/health", timeout=60, trust_env=False)
        assert health.status_code == 200
        if victim is ENCODER_WORKER:
            assert post(stopped.split.url, body("Hello")).status_code == 200
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)
    stopped.check(answers, errors=False)
    assert stopped.pid(victim) == pid


@pytest.mark.parametrize("victim", NAMES, ids=str)
def test_hung_engine_is_ended_with_its_requests(stopped: Stopped, victim: Victim) -> None:
    old = stopped.pid(victim)
    with stopped.at(victim, "streaming") as answers:
        for each in answers:
            each.result(HUNG_AFTER_S + BOUND_S)
    name = NAMES[victim]
    wait_until(lambda: is_up(stopped.split, name), f"{name} is back", within_s=RESTART_S)
    assert stopped.pid(victim) != old
    stopped.check(answers, errors=True)
