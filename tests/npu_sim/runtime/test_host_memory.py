"""Host memory that is registered with the runtime."""

from __future__ import annotations

import ctypes
import time

import pytest

from tests.npu_sim.runtime import acl

SIZE = 4096


def seconds_to_issue_a_copy_from(host: int) -> float:
    with acl.memory(SIZE) as address, acl.stream() as stream:
        start = time.monotonic()
        acl.call("aclrtMemcpyAsync", address, SIZE, host, SIZE, acl.HOST_TO_DEVICE, stream)
        issued = time.monotonic() - start
        acl.call("aclrtSynchronizeStream", stream)
    return issued


@pytest.mark.parametrize("function", ["aclrtHostRegisterV2", "aclrtHostRegister"])
def test_copies_are_asynchronous_only_while_the_memory_is_registered(
    function: str, slow_copies: float
) -> None:
    buffer = ctypes.create_string_buffer(SIZE)
    address = ctypes.addressof(buffer)
    before = seconds_to_issue_a_copy_from(address)
    if function == "aclrtHostRegister":
        device_address = ctypes.c_void_p()
        acl.call(function, address, SIZE, 0, ctypes.byref(device_address))
        assert device_address.value == address
    else:
        acl.call(function, address, SIZE, 0x10000000)
    registered = seconds_to_issue_a_copy_from(address)
    acl.call("aclrtHostUnregister", address)
    after = seconds_to_issue_a_copy_from(address)

    assert registered < slow_copies / 2
    assert min(before, after) >= slow_copies


def test_memory_that_is_not_registered_cannot_be_unregistered() -> None:
    buffer = ctypes.create_string_buffer(SIZE)

    assert acl.code_of("aclrtHostUnregister", ctypes.addressof(buffer)) == acl.INVALID_PARAM


def test_device_memory_cannot_be_registered_as_host_memory() -> None:
    with acl.memory(SIZE) as address:
        assert acl.code_of("aclrtHostRegisterV2", address, SIZE, 0) == acl.INVALID_PARAM
        assert "not host memory" in acl.message()


def test_pinned_memory_is_freed_once() -> None:
    address = acl.pointer_from("aclrtMallocHost", SIZE)
    acl.call("aclrtFreeHost", address)

    assert acl.code_of("aclrtFreeHost", address) == acl.INVALID_PARAM
