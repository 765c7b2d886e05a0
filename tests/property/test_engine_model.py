"""Whatever happens to requests and their items, everybody is answered; over vLLM's real schedulers.

See `tests.property.engine_model`. Two processes try seeds for a while, the same in every run; with
the profile `thorough` for longer, and such as were never tried.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.property.budget import TIMES, is_thorough

pytestmark = pytest.mark.needs_vllm

ROOT = Path(__file__).parents[2]
SEEDS, SECONDS = 4000, 25
"""Of one process, at most; seconds of its processor."""
DEADLINE_S = 600
"""For a process on a busy machine, with what it takes to import vLLM."""
MUST_HAPPEN = {
    "drafts refused",
    "encoders killed",
    "encoders stopped or let go on",
    "items encoded beside a step",
    "items encoded in a step",
    "items placed",
    "items read",
    "prefix hits that end before all items",
    "prefix hits that end behind all items",
    "prefix hits that end between items",
    "prefix hits that end inside an item",
    "requests preempted",
    "requests rolled back",
    "requests that ended: abort",
    "requests that ended: error",
    "requests that ended: length",
    "resets of the encoder cache",
    "resets of the prefix cache",
}


@pytest.mark.parametrize("first", [0, 100_000])
def test_everybody_is_answered_whatever_happens(first: int) -> None:
    if is_thorough():
        first = random.SystemRandom().randrange(10**6, 10**9)
    seconds = SECONDS * (TIMES if is_thorough() else 1)
    command = [
        *(sys.executable, "-m", "tests.property.engine_model"),
        *("--seeds", f"{first}:{first + (10**6 if is_thorough() else SEEDS)}"),
        *("--seconds", str(seconds)),
        *("--most", "3", "--trace", "80"),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds + DEADLINE_S,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr[-4000:]}"
    happened = {what for what, count in json.loads(done.stdout.splitlines()[-1]).items() if count}
    assert happened >= MUST_HAPPEN
