"""SIGSTOP for longer than the lease: a process that is not dead, and goes on where it was."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from epd_portable.items.transfers import LEASE_MARGIN_S
from tests.faults.conftest import Served
from tests.faults.points import (
    ENCODER_SCHEDULER,
    ENCODER_WORKER,
    FRONT,
    PD_SCHEDULER,
    PD_WORKER,
    POINTS,
    Victim,
)
from tests.faults.seeds import SEEDS
from tests.faults.topology import DEADLINE_S, LEASE_S
from tests.faults.traffic import check, requests, send, send_until_struck

STOP_S = LEASE_S + LEASE_MARGIN_S + 0.5
REQUESTS = 8
ALWAYS = {
    (ENCODER_WORKER, "transfer.begun"),
    (PD_SCHEDULER, "transfer.written"),
    (PD_WORKER, "item.landed"),
}
"""Points at which a process holds something that others need; the rest with ``--full``."""
CASES = [
    (victim, point)
    for victim in (ENCODER_WORKER, ENCODER_SCHEDULER, PD_WORKER, PD_SCHEDULER, FRONT)
    for point in POINTS
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("victim", "point"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full) for case in CASES],
    ids=str,
)
def test_process_stopped_beyond_the_lease_costs_no_response(
    served: Served, victim: Victim, point: str, seed: int
) -> None:
    stop_and_resume(served, victim, point, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("victim", "point"), CASES, ids=str)
def test_stop_beyond_the_lease_in_a_group_costs_no_response(
    by_collective: Served, victim: Victim, point: str, seed: int
) -> None:
    stop_and_resume(by_collective, victim, point, seed)


def stop_and_resume(served: Served, victim: Victim, point: str, seed: int) -> None:
    """Stop one process while requests are under way; ask more when it goes on."""
    topology = served.topology
    chance = random.Random(f"stop/{victim}/{point}/{seed}")
    topology.faults.arm(
        point, victim, nth=chance.randint(1, 3), other=chance.randint(0, 1), signum=signal.SIGSTOP
    )

    def resume() -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not topology.faults.struck() and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(STOP_S)
        topology.faults.resume()

    resuming = threading.Thread(target=resume)
    resuming.start()
    try:
        asked, replies = send_until_struck(topology, f"stop/{victim}/{point}", seed, REQUESTS)
    finally:
        resuming.join()
    check(asked, replies, failures=False)
    again = requests(f"after stop/{victim}/{point}", seed, REQUESTS)
    check(again, send(topology, again), failures=False)
    served.check_nothing_is_left()
