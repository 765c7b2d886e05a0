"""Addresses and bytes apart, as torch_npu's expandable segments use them."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ci.ascend_sim.tests.runtime import acl

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 2 * acl.MIB


class PhysicalMemory(ctypes.Structure):
    """``aclrtPhysicalMemProp``."""

    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("device", ctypes.c_uint32),
        ("location_type", ctypes.c_int),
        ("reserved", ctypes.c_uint64),
    )


@contextmanager
def physical_memory(device: int = 0) -> Iterator[int]:
    wanted = PhysicalMemory(device=device, location_type=acl.LOCATION_DEVICE)
    handle = acl.pointer_from("aclrtMallocPhysical", PAGE, ctypes.byref(wanted), 0)
    try:
        yield handle
    finally:
        acl.call("aclrtFreePhysical", handle)


@contextmanager
def addresses(size: int) -> Iterator[int]:
    start = acl.pointer_from("aclrtReserveMemAddress", size, 0, None, 0)
    try:
        yield start
    finally:
        acl.call("aclrtReleaseMemAddress", start)


def test_neighbouring_mappings_are_one_memory_that_outlives_them() -> None:
    with addresses(2 * PAGE) as start, physical_memory() as first, physical_memory() as second:
        acl.call("aclrtMapMem", start, PAGE, 0, first, 0)
        acl.call("aclrtMapMem", start + PAGE, PAGE, 0, second, 0)
        acl.write(start + PAGE - 4, b"12345678")
        acl.call("aclrtUnmapMem", start)

        assert acl.code_of("aclrtMemcpy", start, 4, b"abcd", 4, acl.DEFAULT) == acl.RT_PARAM_INVALID

        acl.call("aclrtMapMem", start, PAGE, 0, first, 0)
        assert acl.read(start + PAGE - 4, 8) == b"12345678"
        acl.call("aclrtUnmapMem", start)
        acl.call("aclrtUnmapMem", start + PAGE)


def test_memory_is_mapped_only_at_reserved_free_addresses() -> None:
    with addresses(PAGE) as start, physical_memory() as handle:
        refused = [
            acl.code_of("aclrtMapMem", start, 2 * PAGE, 0, handle, 0),
            acl.code_of("aclrtMapMem", start + PAGE, PAGE, 0, handle, 0),
        ]
        acl.call("aclrtMapMem", start, PAGE, 0, handle, 0)
        refused += [
            acl.code_of("aclrtMapMem", start, PAGE, 0, handle, 0),
            acl.code_of("aclrtReleaseMemAddress", start),
            acl.code_of("aclrtFree", start),
        ]
        acl.call("aclrtUnmapMem", start)

    assert refused == [acl.INVALID_PARAM] * 5


def test_physical_memory_of_an_unknown_device_is_refused() -> None:
    wanted = PhysicalMemory(device=7, location_type=acl.LOCATION_DEVICE)
    out = ctypes.c_void_p()

    code = acl.code_of("aclrtMallocPhysical", ctypes.byref(out), PAGE, ctypes.byref(wanted), 0)

    assert code == acl.INVALID_DEVICE
