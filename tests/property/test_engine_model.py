"""Whatever happens to requests and their items, everybody is answered; over vLLM's real schedulers.

See `tests.property.engine_model`. A process tries seeds, the same in every run; with the profile
`thorough` for longer, and such as were never tried.
"""

from __future__ import annotations

import json
import os
import random

import pytest

from tests import warm
from tests.property.budget import is_thorough

pytestmark = pytest.mark.needs_vllm

SEEDS = 160
THOROUGH_S = 500
"""Seconds of processor time."""
DEADLINE_S = 600
"""For a process on a busy machine, with what it takes to import vLLM."""
MUST_HAPPEN = {
    "clocks of encoders that jumped",
    "clocks of the instance that jumped",
    "drafts refused",
    "encoders killed",
    "encoders stopped or let go on",
    "items asked for",
    "items encoded beside a step",
    "items encoded in a step",
    "items looked for in the store",
    "items placed",
    "items that an encoder had no memory for",
    "items read",
    "items that are too large",
    "jobs that a full engine refused",
    "jobs that were late",
    "loads that failed",
    "loads that were late",
    "messages of another version",
    "prefix hits that end before all items",
    "prefix hits that end behind all items",
    "prefix hits that end between items",
    "prefix hits that end inside an item",
    "request ids used again",
    "requests preempted",
    "requests rolled back",
    "requests that ended: abort",
    "requests that ended: error",
    "requests sent again",
    "requests that ended: length",
    "resets of the encoder cache",
    "resets of the prefix cache",
    "sleeps: abort",
    "sleeps: keep",
    "sleeps: wait",
    "starts held back",
    "stores that hang or go on",
    "videos in parts",
}


def test_everybody_is_answered_whatever_happens() -> None:
    tried = ["--seeds", f"0:{SEEDS}"]
    if is_thorough():
        first = random.SystemRandom().randrange(10**6, 10**9)
        tried = ["--seeds", f"{first}:{first + 10**6}", "--seconds", str(THOROUGH_S)]
    command = ["-m", "tests.property.engine_model", *tried, "--most", "3", "--trace", "80"]
    environment = {**os.environ, **warm.SAME_HASHES}
    limit_s = THOROUGH_S + DEADLINE_S
    done = warm.over_vllm().run(*command, env=environment, timeout=limit_s)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr[-4000:]}"
    happened = {what for what, count in json.loads(done.stdout.splitlines()[-1]).items() if count}
    assert happened >= MUST_HAPPEN
