"""Device memory: what may be copied where, and what is refused."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch

from ci.ascend_sim.tests.runtime import acl, children

PAGE = 2 * acl.MIB
"""Allocations are whole pages: what lies behind the last page is out of bounds."""


@pytest.mark.parametrize("offset", [1, PAGE], ids=["leaves the allocation", "starts behind it"])
def test_copies_past_the_end_of_an_allocation_are_refused(offset: int) -> None:
    host = ctypes.create_string_buffer(PAGE)
    with acl.memory(PAGE) as address:
        codes = [
            acl.code_of("aclrtMemcpy", address + offset, PAGE, host, PAGE, acl.HOST_TO_DEVICE),
            acl.code_of("aclrtMemcpy", host, PAGE, address + offset, PAGE, acl.DEVICE_TO_HOST),
        ]

        assert codes == [acl.RT_PARAM_INVALID] * 2
        assert "outside of allocated device memory" in acl.message()


def test_copy_beyond_the_stated_capacity_is_refused() -> None:
    with acl.memory(PAGE) as address:
        code = acl.code_of("aclrtMemcpy", address, 4, b"12345", 5, acl.HOST_TO_DEVICE)

        assert code == acl.INVALID_PARAM
        assert "5 bytes into 4" in acl.message()


def test_a_fill_stays_inside_its_allocation() -> None:
    with acl.memory(PAGE) as address:
        acl.call("aclrtMemset", address, PAGE, 0x5A, PAGE)

        assert acl.read(address + PAGE - 4, 4) == b"\x5a" * 4
        assert acl.code_of("aclrtMemset", address, 2 * PAGE, 0, PAGE + 1) == acl.RT_PARAM_INVALID


@pytest.mark.parametrize("kind", [acl.HOST_TO_HOST, acl.DEVICE_TO_HOST, acl.DEVICE_TO_DEVICE])
def test_copy_against_its_declared_direction_is_refused(kind: int) -> None:
    with acl.memory(PAGE) as address:
        code = acl.code_of("aclrtMemcpy", address, PAGE, b"1234", 4, kind)

        assert code == acl.RT_PARAM_INVALID
        assert "from host to device memory" in acl.message()


def test_freed_memory_cannot_be_read() -> None:
    address = acl.malloc(PAGE)
    acl.free(address)

    with pytest.raises(acl.RuntimeCallError, match="outside of allocated device memory"):
        acl.read(address, 4)


def test_memory_freed_under_queued_copy_fails_stream(slow_copies: float) -> None:
    with acl.pinned(PAGE) as host, acl.stream() as stream:
        address = acl.malloc(PAGE)
        acl.call("aclrtMemcpyAsync", address, PAGE, host, PAGE, acl.HOST_TO_DEVICE, stream)
        acl.free(address)

        assert acl.code_of("aclrtSynchronizeStream", stream) == acl.DEVICE_MEM_ERROR
        assert "freed device memory" in acl.message()


@pytest.mark.parametrize("offset", [0, 64], ids=["freed before", "inside an allocation"])
def test_only_the_start_of_a_living_allocation_can_be_freed(offset: int) -> None:
    address = acl.malloc(PAGE)
    if offset == 0:
        acl.free(address)

    assert acl.code_of("aclrtFree", address + offset) == acl.INVALID_PARAM
    assert "not an allocation" in acl.message()
    if offset:
        acl.free(address)


def test_an_exhausted_device_says_how_much_it_has_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASCEND_SIM_MEM_MB", "64")
    torch.npu.empty_cache()
    used = 64 * acl.MIB - free_memory()
    with acl.memory(64 * acl.MIB - used):
        assert (
            acl.code_of("aclrtMalloc", ctypes.byref(ctypes.c_void_p()), 1, 0) == acl.OUT_OF_MEMORY
        )
        assert f"{PAGE} more bytes, {64 * acl.MIB} used of {64 * acl.MIB}" in acl.message()

    with acl.memory(PAGE):
        assert free_memory() == 64 * acl.MIB - used - PAGE


def free_memory() -> int:
    unused, total = ctypes.c_size_t(), ctypes.c_size_t()
    acl.call("aclrtGetMemInfo", 0, ctypes.byref(unused), ctypes.byref(total))
    return unused.value


def test_the_host_cannot_dereference_device_memory() -> None:
    code = "acl.call('aclrtSetDevice', 0); ctypes.string_at(acl.malloc(1), 1)"

    assert children.run(code).returncode == -signal.SIGSEGV


def test_the_address_of_a_tensor_is_a_device_address() -> None:
    tensor = torch.empty(4, device="npu:1")

    said = acl.attributes(tensor.data_ptr())

    assert (said.type, said.id) == (acl.LOCATION_DEVICE, 1)


def test_pinned_and_other_host_memory_are_told_apart() -> None:
    with acl.pinned(4096) as address:
        assert acl.attributes(address + 4095).type == acl.LOCATION_HOST
    assert acl.attributes(address).type == acl.LOCATION_UNREGISTERED
    assert torch.empty(4).pin_memory().is_pinned()
    assert not torch.empty(4).is_pinned()


def test_a_copy_between_devices_moves_the_bytes() -> None:
    with acl.memory(PAGE) as here:
        acl.write(here, b"1234")
        acl.call("aclrtSetDevice", 1)
        with acl.memory(PAGE) as there:
            acl.call("aclrtMemcpy", there, 4, here, 4, acl.DEVICE_TO_DEVICE)

            assert acl.read(there, 4) == b"1234"
            assert acl.attributes(there).id == 1


@pytest.mark.parametrize("function", ["aclrtMemcpyBatch", "aclrtMemcpyBatchAsync"])
def test_a_batch_copies_each_entry_and_names_the_one_that_fails(function: str) -> None:
    failed = ctypes.c_size_t(99)
    with acl.memory(PAGE) as address, acl.stream() as stream:
        last = [stream] if function.endswith("Async") else []
        sources = (ctypes.c_char_p * 2)(b"abcd", b"efgh")
        sizes = (ctypes.c_size_t * 2)(4, 4)
        targets = (ctypes.c_void_p * 2)(address, address + 16)
        acl.call(
            function, targets, sizes, sources, sizes, 2, None, None, 0, ctypes.byref(failed), *last
        )
        assert (acl.read(address, 4), acl.read(address + 16, 4)) == (b"abcd", b"efgh")

        targets[1] = address + PAGE
        code = acl.code_of(
            function, targets, sizes, sources, sizes, 2, None, None, 0, ctypes.byref(failed), *last
        )
        assert (code, failed.value) == (acl.RT_PARAM_INVALID, 1)
