"""Probe of one device with this package's own code; prints figures for ci/first_hour.py.

    python -m tests.first_hour.probe cuda|npu

Needs torch, and no engine. Every question is asked, whatever becomes of the others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from epd_portable.platforms import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.pool import SharedMemory
from epd_portable.transfer.sessions import new_session
from epd_portable.transfer.slab import DeviceSlab, OpenedSlab

MIB = 1 << 20
SLAB_BYTES = 512 * MIB
SIZES = (MIB // 2, 7 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
FILL = 0xA5
OFFSET = 512
HOST_BYTES = 64 * MIB
REST_S = 0.01
AMPLE_S = 60.0
CHILD_LIMIT_S = 100


def tell(figure: str, ask: Callable[[], Any]) -> None:
    """Print what a question is answered with, or why it is not."""
    try:
        value = ask()
    except Exception as error:  # Every answer is wanted, this one too.
        value = f"FAILED {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    print(json.dumps({"figure": figure, "value": value}), flush=True)


def own_copies() -> DeviceCopies:
    platform = registry.get(sys.argv[1])
    platform.set_device(0)
    return DeviceCopies(platform, 0)


def runtime() -> Any:
    """Return ``torch.cuda`` or ``torch.npu``, which the platform has imported."""
    return getattr(torch, sys.argv[1])


def device_rate(target: torch.Tensor, source: torch.Tensor, repeat: int = 20) -> float:
    """Return GB of ``source`` that the device copies in a second, one copy behind the other."""
    begin, end = runtime().Event(enable_timing=True), runtime().Event(enable_timing=True)
    for _ in range(3):
        target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(repeat):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return round(source.numel() * repeat / begin.elapsed_time(end) / 1e6, 1)


def whole_copy(
    copies: DeviceCopies, target: torch.Tensor, source: torch.Tensor, rest_s: float = 0.0
) -> dict[str, float]:
    """Return the median time and rate of a copy from the question to its end, after a rest."""
    computed = copies.platform.record_event()
    times = []
    for _ in range(30):
        time.sleep(rest_s)
        begin_s = time.perf_counter()
        deadline_s = copies.clock() + AMPLE_S
        copies.queue(target, source, after=computed, deadline_s=deadline_s).finish()
        times.append(time.perf_counter() - begin_s)
    middle_s = statistics.median(times)
    return {"us": round(middle_s * 1e6, 1), "GB_s": round(source.numel() / middle_s / 1e9, 1)}


def slab_of_another() -> None:
    """Let another process write into this one's slab; tell what it says and what arrived."""
    slab = DeviceSlab(own_copies(), SLAB_BYTES, new_session())
    whole = slab.tensor(0, SLAB_BYTES)
    whole.fill_(FILL)
    runtime().synchronize()
    ran = subprocess.run(
        [sys.executable, "-m", "tests.first_hour.probe", sys.argv[1], slab.address],
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=False,
    )
    print(ran.stdout, end="", flush=True)
    tell("ipc.problem", lambda: ran.stderr.splitlines()[-1:] if ran.returncode else "")
    end = OFFSET + SIZES[-1]
    tell("ipc.content_is_right", lambda: bool((whole[OFFSET:end] == 7).all()))
    tell(
        "ipc.neighbours_are_untouched",
        lambda: bool((whole[:OFFSET] == FILL).all() and (whole[end:] == FILL).all()),
    )


def write_into(address: str) -> None:
    """Be that other process."""
    copies = own_copies()
    begin_s = time.perf_counter()
    slab = OpenedSlab(copies.platform, address)
    tell("ipc.open_s", lambda: round(time.perf_counter() - begin_s, 3))
    for nbytes in SIZES:
        source = torch.full((nbytes,), 7, dtype=torch.uint8, device=copies.device)
        own, other = torch.empty_like(source), slab.tensor(OFFSET, nbytes)
        tell(
            f"copy.{nbytes >> 10}KiB",
            lambda own=own, other=other, source=source: {
                "own_GB_s": device_rate(own, source),
                "ipc_GB_s": device_rate(other, source),
                "queued": whole_copy(copies, other, source),
                "rested": whole_copy(copies, other, source, REST_S),
            },
        )


def host_rates(pin: bool) -> dict[str, float]:
    """Return rates to and from a receive pool in shared memory, page-locked or not."""
    copies, name = own_copies(), f"epd-probe-{os.getpid()}"
    item = torch.full((HOST_BYTES,), 7, dtype=torch.uint8, device=copies.device)
    pool = SharedMemory.create(name, HOST_BYTES)
    try:
        host = pool.tensor(0, HOST_BYTES)
        host.fill_(0)  # Its pages are there before they are timed.
        blocks = copies.pin(pool) if pin else None
        found = {
            "out": whole_copy(copies, host, item)["GB_s"],
            "in": device_rate(item, host),
            "page_locked": float(bool(blocks)),
        }
        if pin:
            copies.unpin(pool)
        return found
    finally:
        pool.unlink()


def main() -> None:
    """Ask everything."""
    if sys.argv[2:]:
        write_into(sys.argv[2])
        return
    own_copies()
    tell("device", lambda: [runtime().get_device_name(0), torch.__version__])
    tell("slab", slab_of_another)
    tell("host.page_locked", lambda: host_rates(True))
    tell("host.pageable", lambda: host_rates(False))


if __name__ == "__main__":
    main()
