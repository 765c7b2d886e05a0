"""Failures of operations of the simulated HCCL: with a reason, in time, and for good."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ci.ascend_sim.tests.runtime import acl, children, hccl

if TYPE_CHECKING:
    from ci.ascend_sim.tests.runtime.hccl import Rank

SOON_S = 30
"""Half of the default timeout."""


@pytest.mark.parametrize(
    ("sent", "expected", "said"),
    [
        (
            (4, hccl.BFP16),
            (2, hccl.FP32),
            "expects op 0 type 4 of 8 bytes .* sent op 0 type 11 of 8",
        ),
        ((3, hccl.FP32), (4, hccl.FP32), "expects op 0 type 4 of 16 bytes .* type 4 of 12"),
    ],
    ids=["type", "size"],
)
def test_a_receiver_that_expects_another_type_or_size_fails(
    sent: tuple[int, int], expected: tuple[int, int], said: str
) -> None:
    is_sent = threading.Event()

    def work(rank: Rank) -> None:
        buffer = rank.device_memory(bytes(16))
        if rank.number == 0:
            rank.do("HcclSend", buffer, *sent, 1)
            is_sent.set()
            return
        assert is_sent.wait(SOON_S)
        with pytest.raises(acl.RuntimeCallError, match=said):
            rank.do("HcclRecv", buffer, *expected, 0)
        assert rank.state() == hccl.PARA

    hccl.on_ranks(2, work)


def test_ranks_that_call_different_operations_fail() -> None:
    def work(rank: Rank) -> str:
        source, target = rank.device_memory(bytes(8)), rank.device_memory(bytes(16))
        if rank.number == 0:
            rank.start("HcclAllGather", source, target, 1, hccl.FP32)
        else:
            rank.start("HcclAllReduce", source, target, 1, hccl.FP32, hccl.SUM)
        return acl.message() if rank.wait() else ""

    assert any("sent op" in text for text in hccl.on_ranks(2, work))


def test_a_communicator_that_failed_stays_failed() -> None:
    are_sent = threading.Event()

    def work(rank: Rank) -> None:
        buffer = rank.device_memory(bytes(16))
        if rank.number == 0:
            rank.do("HcclSend", buffer, 1, hccl.FP32, 1)
            rank.do("HcclSend", buffer, 2, hccl.FP32, 1)
            are_sent.set()
            return
        assert are_sent.wait(SOON_S)
        for _ in range(2):
            with pytest.raises(acl.RuntimeCallError, match=r"sent op 0 type 4 of 4$"):
                rank.do("HcclRecv", buffer, 2, hccl.FP32, 0)

    hccl.on_ranks(2, work)


def test_destroyed_communicator_ends_work_at_both_peers() -> None:
    is_running = threading.Event()

    def work(rank: Rank) -> str:
        buffer, arrived = rank.device_memory(bytes(4)), rank.device_memory(bytes(4))
        never_sent = (hccl.RECV, buffer, 1, hccl.FP32, 1 - rank.number)
        if rank.number == 0:
            items = (hccl.Item * 2)((hccl.SEND, buffer, 1, hccl.FP32, 1), never_sent)
            rank.start("HcclBatchSendRecv", items, 2)
            assert is_running.wait(SOON_S)
            acl.call("HcclCommDestroy", rank.communicator)
            rank.communicator = 0
        else:
            rank.do("HcclRecv", arrived, 1, hccl.FP32, 0)
            is_running.set()
            rank.start("HcclRecv", *never_sent[1:])
        assert rank.wait() == acl.RT_INTERNAL_ERROR
        return acl.message()

    start = time.monotonic()
    destroyed, peer = hccl.on_ranks(2, work)

    assert "rank 0 lost rank 1" in destroyed
    assert "rank 1 lost rank 0" in peer
    assert time.monotonic() - start < SOON_S


def test_a_message_that_does_not_come_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    root = hccl.new_root()
    silent = f"""
with hccl.join({root!r}, 2, 1):
    sys.stdin.readline()
"""
    with children.talking(silent), hccl.join(root, 2, 0) as rank:
        monkeypatch.setenv("ASCEND_SIM_HCCL_TIMEOUT_MS", "200")
        rank.start("HcclRecv", rank.device_memory(bytes(4)), 1, hccl.FP32, 1)

        assert rank.wait() == acl.RT_INTERNAL_ERROR
        assert "rank 0 waited 200 ms for rank 1" in acl.message()
        assert "ASCEND_SIM_HCCL_TIMEOUT_MS" in acl.message()
        assert rank.state() == hccl.TIMEOUT


def test_a_rank_that_stays_alone_gives_up_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_SIM_HCCL_TIMEOUT_MS", "200")
    communicator = ctypes.c_void_p()

    code = acl.code_of("HcclCommInitRootInfo", 2, hccl.new_root(), 0, ctypes.byref(communicator))

    assert code == hccl.TIMEOUT
    assert "rank 0 of 2 waited 200 ms for the others" in acl.message()


def test_a_rank_outside_of_its_communicator_is_refused() -> None:
    out = ctypes.byref(ctypes.c_void_p())

    assert acl.code_of("HcclCommInitRootInfo", 2, hccl.new_root(), 2, out) == hccl.PARA


def test_misuse_is_refused_before_anything_moves() -> None:
    def work(rank: Rank) -> None:
        buffer = rank.device_memory(bytes(4))
        refused = [
            rank.start("HcclSend", buffer, 1, hccl.FP32, rank.number),
            rank.start("HcclSend", buffer, 1, hccl.FP32, 2),
            rank.start("HcclSend", buffer, 1, 13, 1 - rank.number),
            rank.start("HcclAllReduce", buffer, buffer, 1, hccl.FP32, 4),
            rank.start("HcclAllReduce", buffer, buffer, 1, hccl.UINT16, hccl.SUM),
        ]
        assert refused == [hccl.PARA] * 3 + [hccl.NOT_SUPPORT] * 2
        rank.do("HcclBarrier")

    hccl.on_ranks(2, work)


@pytest.mark.parametrize("place", ["host", "end"])
def test_buffers_must_lie_in_device_memory(place: str) -> None:
    def work(rank: Rank) -> None:
        host = ctypes.create_string_buffer(4)
        buffer = rank.device_memory(bytes(4)) + 2 * acl.MIB - 2
        with pytest.raises(acl.RuntimeCallError, match="host memory, or leaves its device memory"):
            rank.do(
                "HcclAllReduce",
                *(host if place == "host" else buffer, host if place == "host" else buffer),
                *(1, hccl.FP32, hccl.SUM),
            )

    hccl.on_ranks(1, work)
