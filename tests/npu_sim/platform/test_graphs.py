"""ACL graphs of the engine beside our copy stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from epd_portable.platforms.base import Platform
from epd_portable.transfer.copies import DeviceCopies, QueuedCopy
from tests.npu_sim.platform.children import run

NBYTES = 1 << 16
AMPLE_S = 20.0


@pytest.fixture
def copies(npu: Platform) -> Iterator[DeviceCopies]:
    npu.set_device(0)
    torch.npu.synchronize()
    yield DeviceCopies(npu, 0)
    torch.npu.synchronize()


def bytes_of(value: int) -> torch.Tensor:
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def queued(copies: DeviceCopies, target: torch.Tensor, value: int) -> QueuedCopy:
    source = bytes_of(value).pin_memory()
    after = copies.platform.record_event()
    return copies.queue(target, source, after=after, deadline_s=time.monotonic() + AMPLE_S)


def test_graph_reads_copied_data_when_compute_waits_before_it(
    copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, read = (torch.zeros(NBYTES, dtype=torch.uint8, device="npu:0") for _ in range(2))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        read.copy_(item, non_blocking=True)
    assert int(read[0]) == 0, "it is captured, not run"
    monkeypatch.setenv("ASCEND_SIM_COPY_US", "100000")
    for value in (1, 2):
        arrived = copies.to_device(bytes_of(value).pin_memory())
        item.copy_(arrived, non_blocking=True)
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(read.cpu(), bytes_of(value))


def test_copies_of_other_threads_do_not_disturb_a_capture(copies: DeviceCopies) -> None:
    item, read, sent = (torch.zeros(NBYTES, dtype=torch.uint8, device="npu:0") for _ in range(3))

    def send() -> None:
        copies.platform.set_device(0)
        queued(copies, sent, 7).finish()

    send()
    graph = torch.npu.NPUGraph()
    with ThreadPoolExecutor(1) as pool, torch.npu.graph(graph):
        read.copy_(item, non_blocking=True)
        sending = pool.submit(send)
        sending.result(AMPLE_S)
    item.fill_(3)
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(sent.cpu(), bytes_of(7))
    assert torch.equal(read.cpu(), bytes_of(3))


def test_a_wait_for_the_copy_stream_within_a_capture_fails_it() -> None:
    """So a step waits before its graph runs, as ours do."""
    # What torch_npu queues behind the refused wait is lost: not in this process.
    printed = run(
        """
import torch
from epd_portable.platforms import registry

npu = registry.get("npu")
npu.set_device(0)
with npu.stream(0):
    torch.zeros(8, device="npu:0")
    copied = npu.record_event()
try:
    with torch.npu.graph(torch.npu.NPUGraph()):
        copied.wait()
except RuntimeError as error:
    print("@@", error)
""",
        ASCEND_LAUNCH_BLOCKING="1",
    )
    assert "capture was spoiled" in printed
