"""Results of each operation of the simulated HCCL, against PyTorch on the CPU."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, TypeAlias

import pytest
import torch

from ci.ascend_sim.tests.runtime import acl, hccl

if TYPE_CHECKING:
    from collections.abc import Callable

    from ci.ascend_sim.tests.runtime.hccl import Rank

RANKS = 3
COUNT = 12  # elements of one part; not a multiple of anything but 3 and 4

TYPES = {
    torch.int8: hccl.INT8,
    torch.uint8: hccl.UINT8,
    torch.int16: hccl.INT16,
    torch.int32: hccl.INT32,
    torch.int64: hccl.INT64,
    torch.float16: hccl.FP16,
    torch.bfloat16: hccl.BFP16,
    torch.float32: hccl.FP32,
    torch.float64: hccl.FP64,
}
Call: TypeAlias = "Callable[[int | None, int], tuple[object, ...]]"
REDUCTIONS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    hccl.SUM: torch.add,
    hccl.PROD: torch.mul,
    hccl.MAX: torch.maximum,
    hccl.MIN: torch.minimum,
}


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def values_of(number: int, dtype: torch.dtype = torch.float32, count: int = COUNT) -> torch.Tensor:
    """Small values of a rank: sums and products of all ranks' fit in every type."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 5, (count,), generator=generator).to(dtype)


def reduced(reduction: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return functools.reduce(
        REDUCTIONS[reduction], [values_of(number, dtype, count) for number in range(RANKS)]
    )


def room(rank: Rank, size: int) -> int:
    return rank.device_memory(b"\xee" * size)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_ranks_get_equal_results_from_all_reduce(dtype: torch.dtype, reduction: int) -> None:
    wanted = to_bytes(reduced(reduction, dtype))

    def work(rank: Rank) -> bytes:
        source = rank.device_memory(to_bytes(values_of(rank.number, dtype)))
        target = room(rank, len(wanted))
        rank.do("HcclAllReduce", source, target, COUNT, TYPES[dtype], reduction)
        return acl.read(target, len(wanted))

    assert hccl.on_ranks(RANKS, work) == [wanted] * RANKS


WIDE = [values_of(number, torch.int64, COUNT * RANKS) for number in range(RANKS)]
NARROW = [each.int() for each in WIDE]
OF_ONE = values_of(1, torch.float32, COUNT * RANKS)
UNTOUCHED = torch.full((4 * COUNT,), 0xEE, dtype=torch.uint8)
OPERATIONS: dict[str, tuple[list[torch.Tensor | None], Call, list[torch.Tensor]]] = {
    "HcclReduce": (
        [values_of(number) for number in range(RANKS)],
        lambda source, target: (source, target, COUNT, hccl.FP32, hccl.SUM, 1),
        [UNTOUCHED, reduced(hccl.SUM, torch.float32), UNTOUCHED],
    ),
    "HcclReduceScatter": (
        [*NARROW],
        lambda source, target: (source, target, COUNT, hccl.INT32, hccl.SUM),
        [*sum(NARROW[1:], NARROW[0]).split(COUNT)],
    ),
    "HcclScatter": (
        [None, OF_ONE, None],
        lambda source, target: (source, target, COUNT, hccl.FP32, 1),
        [*OF_ONE.split(COUNT)],
    ),
    "HcclAllGather": (
        [values_of(number) for number in range(RANKS)],
        lambda source, target: (source, target, COUNT, hccl.FP32),
        [torch.cat([values_of(number) for number in range(RANKS)])] * RANKS,
    ),
    "HcclAlltoAll": (
        [*WIDE],
        lambda source, target: (source, COUNT, hccl.INT64, target, COUNT, hccl.INT64),
        [*torch.stack(WIDE).view(RANKS, RANKS, COUNT).transpose(0, 1)],
    ),
}
"""Input, call and output of each rank."""


@pytest.mark.parametrize("function", OPERATIONS)
def test_ranks_get_their_own_part_of_an_operation(function: str) -> None:
    given, call, wanted = OPERATIONS[function]

    def work(rank: Rank) -> bytes:
        own, size = given[rank.number], len(to_bytes(wanted[rank.number]))
        source = None if own is None else rank.device_memory(to_bytes(own))
        target = room(rank, size)
        rank.do(function, *call(source, target))
        return acl.read(target, size)

    assert hccl.on_ranks(RANKS, work) == [to_bytes(each) for each in wanted]


def test_broadcast_spreads_the_bytes_of_its_root() -> None:
    def work(rank: Rank) -> bytes:
        buffer = rank.device_memory(to_bytes(values_of(rank.number)))
        rank.do("HcclBroadcast", buffer, COUNT, hccl.FP32, 2)
        return acl.read(buffer, 4 * COUNT)

    assert hccl.on_ranks(RANKS, work) == [to_bytes(values_of(2))] * RANKS


def test_exchange_among_ranks_moves_parts_of_different_sizes() -> None:
    def work(rank: Rank) -> bytes:
        array = ctypes.c_uint64 * 2
        other = 1 - rank.number
        # Rank 0 sends "ab" to rank 1, which sends "c" to rank 0; each keeps one byte.
        source = rank.device_memory(b"0ab" if rank.number == 0 else b"c1")
        sends = [1, 2] if rank.number == 0 else [1, 1]
        receives = [1, 1] if rank.number == 0 else [2, 1]
        target = room(rank, 3)
        rank.do(
            "HcclAlltoAllV",
            *(source, array(*sends), array(0, sends[0]), hccl.UINT8),
            *(target, array(*receives), array(0, receives[0]), hccl.UINT8),
        )
        return acl.read(target, receives[rank.number] + receives[other])

    assert hccl.on_ranks(2, work) == [b"0c", b"ab1"]


def test_batch_holds_messages_of_different_types_and_sizes() -> None:
    size = 8 * acl.MIB

    def work(rank: Rank) -> bytes:
        kind = hccl.SEND if rank.number == 0 else hccl.RECV
        first = rank.device_memory((b"abcd" if rank.number == 0 else b"....") * (size // 4))
        second = rank.device_memory(b"efgh" if rank.number == 0 else b"....")
        peer = 1 - rank.number
        items = (hccl.Item * 2)(
            (kind, first, size // 4, hccl.FP32, peer), (kind, second, 2, hccl.BFP16, peer)
        )
        rank.do("HcclBatchSendRecv", items, 2)
        return acl.read(first + size - 4, 4) + acl.read(second, 4)

    assert hccl.on_ranks(2, work)[1] == b"abcdefgh"


def test_a_barrier_waits_for_the_last_rank() -> None:
    arrived: list[int] = []

    def work(rank: Rank) -> int:
        if rank.number == 0:
            acl.call("ascend_sim_delay", rank.stream, 100_000)
            arrive = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: arrived.append(0))
            acl.call("aclrtLaunchHostFunc", rank.stream, arrive, None)
        rank.do("HcclBarrier")
        return len(arrived)

    assert hccl.on_ranks(RANKS, work) == [1] * RANKS


def test_a_part_of_the_ranks_can_make_a_communicator_of_its_own() -> None:
    def work(rank: Rank) -> bytes | None:
        new = ctypes.c_void_p()
        parent = ctypes.byref(ctypes.c_void_p(rank.communicator))
        chosen = (ctypes.c_uint32 * 2)(2, 0)
        if rank.number == 1:
            acl.call(
                "HcclCreateSubCommConfig", parent, 2, None, 7, 2**32 - 1, None, ctypes.byref(new)
            )
            assert new.value is None
            return None
        mine = [2, 0].index(rank.number)
        acl.call("HcclCreateSubCommConfig", parent, 2, chosen, 7, mine, None, ctypes.byref(new))
        number, ranks = ctypes.c_uint32(), ctypes.c_uint32()
        acl.call("HcclGetRankId", new.value, ctypes.byref(number))
        acl.call("HcclGetRankSize", new.value, ctypes.byref(ranks))
        assert (number.value, ranks.value) == (mine, 2)
        buffer = rank.device_memory(bytes([rank.number]))
        acl.call("HcclBroadcast", buffer, 1, hccl.UINT8, 0, new.value, rank.stream)
        assert rank.wait() == acl.SUCCESS
        acl.call("HcclCommDestroy", new.value)
        return acl.read(buffer, 1)

    assert hccl.on_ranks(RANKS, work) == [b"\x02", None, b"\x02"]
