"""Waiting for what happens beside a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0
"""By then it has happened, on a busy machine too."""
POLL_S = 0.005
"""Seconds between two polls: shorter ones take the core from the process that is waited for."""


def until(poll: Callable[[], T]) -> T:
    """Ask again and again; return the first answer that is true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := poll()):
        assert time.monotonic() < deadline_s, f"did not happen within {DEADLINE_S:g} s"
        time.sleep(POLL_S)
    return found


async def until_async(poll: Callable[[], T]) -> T:
    """Do as `until` does, while other coroutines go on."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := poll()):
            await asyncio.sleep(POLL_S)
    return found
