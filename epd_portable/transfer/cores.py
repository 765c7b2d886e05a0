"""Cores of a process's threads, and its share of a device."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from epd_portable.envs import EPD_COMPUTE_SHARE
from epd_portable.errors import UnsupportedError
from epd_portable.platforms.base import LimitsCompute, Platform

logger = logging.getLogger(__name__)

_BYTES_PER_THREAD = 1 << 16
"""An operation on this much has a thread of its own; torch's grain is half of it."""
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_LATE_NS = 100_000_000


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Let threads that start meanwhile run on every core that any thread of this process may use.

    Threads inherit the cores of the thread that starts them, and where OpenMP binds its threads one
    by one, torch's libgomp leaves the thread that loads it one core: the encoder's first.
    """
    with cores_kept():
        os.sched_setaffinity(0, _all_cores())
        yield


@contextmanager
def cores_kept() -> Iterator[None]:
    """Let this thread run afterwards where it ran before.

    vLLM's NIXL connector binds the thread that makes it to the last core of every memory node
    (0.32, on the CPU). In an instance of one rank that is the thread that computes, and all
    instances of a host would compute on the same core.
    """
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def timers_late() -> Iterator[None]:
    """Let timers of threads that start meanwhile be up to a tenth of a second late.

    Anything else that wakes them still does at once. For the loops of gloo's groups, of which vLLM
    makes a dozen also for one rank: each wakes every 10 ms to see whether it is to end (torch
    2.13), and together they would interrupt a step on their core more than a thousand times a
    second.
    """
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_PR_GET_TIMERSLACK)
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_LATE_NS))
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(before))


def _all_cores() -> set[int]:
    # OpenMP starts its threads, and binds them, with the first operation that needs them all.
    torch.empty(torch.get_num_threads() * _BYTES_PER_THREAD, dtype=torch.uint8).zero_()
    cores = os.sched_getaffinity(0)
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # It has ended meanwhile.
            cores |= os.sched_getaffinity(int(task))
    return cores


def limit_compute(platform: Platform, index: int) -> None:
    """Keep this process to its share of its device, where it must do that itself."""
    share = EPD_COMPUTE_SHARE.get()
    if share is None:
        return
    if not isinstance(platform, LimitsCompute):
        raise UnsupportedError(
            f"EPD_COMPUTE_SHARE={share}: processes do not limit themselves on platform "
            f"{platform.name}; remove it"
        )
    units = platform.limit_compute(index, share)
    left = ", ".join(f"{count} {unit}" for unit, count in units.items())
    logger.info("this process computes with %s", left)
