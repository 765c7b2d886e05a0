"""A consumer that restarts again and again: its producers keep nothing of its former lives."""

from __future__ import annotations

import functools
import gc
import operator
import os
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from epd_portable.demo.servers import free_port
from tests.faults.census import descriptors_of
from tests.faults.ends import (
    DEADLINE_S,
    PATIENT_S,
    Consumer,
    addresses,
    deliver,
    make_sender,
    settle,
)
from tests.faults.small.pictures import Picture

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
def test_a_producer_has_as_many_files_after_many_restarts_as_after_one(
    tmp_path: Path, path: str, lives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Writers start, and connect, when they first have something to do.
    monkeypatch.setattr("epd_portable.encode.outputs._WRITERS", 1)
    address, _ = addresses(tmp_path)
    pool = f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    data = f"tcp://127.0.0.1:{free_port()}"
    patient = {"lease_s": PATIENT_S, "wait_s": PATIENT_S}
    sender = make_sender(path, **patient)
    counts = []
    try:
        for life in range(lives):
            consumer = Consumer(address, pool, path, data_address=data, **patient)
            try:
                asked = [Picture(f"{life}-{number}", 16) for number in range(PER_LIFE)]
                sources = deliver(consumer, sender, address, asked, life)
                assert "transfer" in sources.values()
                settle(consumer, sender)
            finally:
                consumer.close()
            del consumer
            counts.append(kept_files())
        most = functools.reduce(operator.or_, counts[1:-1])
        # When the last consumer's end is closed is a matter of the moment.
        end_s = time.monotonic() + DEADLINE_S
        while counts[-1] - most:
            assert time.monotonic() < end_s, counts
            counts[-1] = kept_files()
    finally:
        sender.close()
