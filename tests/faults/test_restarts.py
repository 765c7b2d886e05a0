"""A consumer that restarts again and again: its producers keep nothing of its former lives."""

from __future__ import annotations

import functools
import gc
import operator
import os
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from epd_portable.demo.servers import free_port
from tests.faults.census import descriptors_of
from tests.faults.ends import (
    DEADLINE_S,
    PATIENT,
    Close,
    addresses,
    consumer,
    deliver,
    producer,
    settle,
)
from tests.receiving import pool_name

PER_LIFE = 4


def open_files() -> Counter[str]:
    """Return the open descriptors of this process by kind, mapped pools and threads."""
    kinds = descriptors_of(os.getpid())
    kinds["mapped"] = Path("/proc/self/maps").read_text().count("/dev/shm/epd-test-")
    kinds["threads"] = threading.active_count()
    return kinds


def kept_files() -> Counter[str]:
    """Return what stays open: ZMQ closes its ends, and tries others, in threads of its own."""
    gc.collect()
    kept = open_files()
    for _ in range(20):
        time.sleep(0.02)
        kept &= open_files()
    return kept


@pytest.mark.parametrize("lives", [4, pytest.param(6, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", ["shm", "tcp", "collective", "nixl"])
def test_producer_leaks_no_files_over_many_restarts(
    tmp_path: Path, close: Close, path: str, lives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Writers start, and connect, when they first have something to do.
    monkeypatch.setattr("epd_portable.encode.writers._WRITERS", 1)
    address, _ = addresses(tmp_path)
    pool, data_address = pool_name(), f"tcp://127.0.0.1:{free_port()}"
    sender = producer(path, close, **PATIENT)
    counts = []
    for number in range(lives):
        with ExitStack() as life:
            pd = consumer(
                path, address, life.callback, pool=pool, data_address=data_address, **PATIENT
            )
            asked = {f"{number}-{place}": 16 for place in range(PER_LIFE)}
            sources = deliver(pd, sender, address, asked, number)
            assert "transfer" in sources.values()
            settle(pd, sender)
        del pd, life
        counts.append(kept_files())
    most = functools.reduce(operator.or_, counts[1:-1])
    # When the last consumer's end is closed is a matter of the moment.
    end_s = time.monotonic() + DEADLINE_S
    while counts[-1] - most:
        assert time.monotonic() < end_s, counts
        counts[-1] = kept_files()
