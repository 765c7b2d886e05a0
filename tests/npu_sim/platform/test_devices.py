"""Properties of a device: its index, its memory, its peers."""

from __future__ import annotations

import threading

import pytest
import torch

from epd_portable.errors import PlatformUnavailableError, UnsupportedError
from epd_portable.platforms.base import Platform
from epd_portable.platforms.traits import TRAITS
from tests.npu_sim.platform.children import run


def test_a_device_always_has_its_index(npu: Platform) -> None:
    assert [str(npu.device(index)) for index in (0, 1)] == ["npu:0", "npu:1"]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_device_that_is_not_there_is_refused_by_every_call(npu: Platform, index: int) -> None:
    calls = (npu.device, npu.set_device, npu.memory_info, npu.stream)
    for call in calls:
        with pytest.raises(PlatformUnavailableError, match=f"npu device {index} of 2"):
            call(index)


def test_the_current_device_is_one_of_each_thread(npu: Platform) -> None:
    seen: list[int] = []

    def use_the_second() -> None:
        npu.set_device(1)
        seen.append(torch.ones(1, device="npu").device.index)

    npu.set_device(0)
    thread = threading.Thread(target=use_the_second)
    thread.start()
    thread.join(20)
    assert seen == [1]
    assert torch.ones(1, device="npu").device.index == 0


def test_free_memory_falls_by_what_is_allocated_and_comes_back() -> None:
    """In a process of its own: what tests before it have left would be given back in the middle."""
    run(
        """
import torch
from epd_portable.platforms import registry
npu, mib = registry.get("npu"), 1 << 20
warm = [torch.empty(1, device=f"npu:{index}") for index in (0, 1)]
before, other = npu.memory_info(1), npu.memory_info(0)
assert 0 < before.free_bytes <= before.total_bytes, before
held = torch.empty(64 * mib, dtype=torch.uint8, device="npu:1")
taken = before.free_bytes - npu.memory_info(1).free_bytes
assert 64 * mib <= taken <= 96 * mib, taken
assert npu.memory_info(0) == other
del held
torch.npu.empty_cache()
assert npu.memory_info(1) == before
"""
    )


def test_full_device_raises_the_error_of_torch() -> None:
    """Messages that follow from it are tested on the CPU."""
    code = """
import torch
try:
    torch.empty(128 << 20, dtype=torch.uint8, device="npu:1")
except torch.OutOfMemoryError:
    print("@@ full")
"""
    assert "@@ full" in run(code, ASCEND_SIM_MEM_MB="64")


def test_memory_of_allocator_is_aligned_for_copies_and_for_slots(npu: Platform) -> None:
    held = [torch.empty(size, dtype=torch.uint8, device="npu:0") for size in (1, 65, 513, 4097)]
    for tensor in held:
        # aclrtMemcpyAsync demands 64 bytes; a slot starts at a multiple of the trait.
        assert tensor.data_ptr() % 64 == 0
        assert tensor.data_ptr() % TRAITS["npu"].slot_alignment_bytes == 0


def test_cuda_platform_is_unavailable_under_ascends_alias() -> None:
    printed = run(
        """
import torch, torch_npu
torch.cuda.Event, torch.cuda.Stream = torch.npu.Event, torch.npu.Stream
torch.cuda.current_stream = torch.npu.current_stream
torch.cuda.mem_get_info = torch.npu.mem_get_info
from epd_portable.platforms import registry
print("@@", *(registry.availability(name).ok for name in ("npu", "cuda")))
"""
    )
    assert "@@ True False" in printed


def test_process_limits_its_own_share_of_a_device() -> None:
    code = """
from epd_portable.platforms import registry
npu = registry.get("npu")
npu.set_device(0)
print(*npu.compute_units(0).values(), end=" ")
print(*npu.limit_compute(0, 30).values(), end=" ")
print(*npu.compute_units(1).values(), end=" ")
"""
    for _ in range(2):
        assert run(code).split()[-6:] == ["20", "40", "6", "12", "20", "40"]


def test_the_smallest_part_has_a_core_of_each_kind() -> None:
    code = """
from epd_portable.platforms import registry
npu = registry.get("npu")
npu.set_device(0)
print(*npu.limit_compute(0, 1).values())
"""
    assert run(code).split()[-2:] == ["1", "1"]


def test_a_runtime_that_cannot_limit_cores_says_so(
    npu: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.npu, "get_device_limit")
    with pytest.raises(UnsupportedError, match="npu-smi set -t create-vnpu"):
        npu.limit_compute(0, 50)
