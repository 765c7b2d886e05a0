"""Calls of the simulated runtime below torch_npu for tests, through ctypes; imports no torch.

It runs in the test process, beside the real torch_npu, and in children that load the runtime alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20

# Codes of CANN, from the wheel's acl_base_rt.h and rt_error_codes.h.
SUCCESS = 0
INVALID_PARAM = 100000
RT_PARAM_INVALID = 107000
INVALID_DEVICE = 107001
CONTEXT_NULL = 107002
OUT_OF_MEMORY = 207001
RT_INTERNAL_ERROR = 507000
STREAM_SYNC_TIMEOUT = 507046
EVENT_SYNC_TIMEOUT = 507047
DEVICE_MEM_ERROR = 507053

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
LOCATION_HOST, LOCATION_DEVICE, LOCATION_UNREGISTERED = range(3)


class RuntimeCallError(RuntimeError):
    """A function of the runtime that answered with a code."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {code}: {text}")
        self.code = code


class PointerAttributes(ctypes.Structure):
    """``aclrtPtrAttributes``."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("type", ctypes.c_int),
        ("page_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 4),
    )


def library_path() -> Path:
    """Return where torch_npu finds the runtime."""
    found = importlib.util.find_spec("torch_npu")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent.parent / "torch_npu.libs/libascendcl.so"


@functools.cache
def library() -> ctypes.CDLL:
    """Load the runtime; the one that torch_npu uses, if it is in the process."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.aclGetRecentErrMsg.restype = ctypes.c_char_p
    loaded.HcclGetErrorString.restype = ctypes.c_char_p
    return loaded


def message() -> str:
    """Return the text of the last failure in this thread."""
    return library().aclGetRecentErrMsg().decode()


def code_of(function: str, *arguments: object) -> int:
    """Call a function and return its code; Python integers are passed as 64 bits."""
    converted = [ctypes.c_uint64(a & (1 << 64) - 1) if type(a) is int else a for a in arguments]
    return int(getattr(library(), function)(*converted))


def call(function: str, *arguments: object) -> None:
    """Call a function that must succeed.

    Raises:
        RuntimeCallError: It answered with a code.
    """
    code = code_of(function, *arguments)
    if code != SUCCESS:
        raise RuntimeCallError(function, code, message())


def pointer_from(function: str, *arguments: object) -> int:
    """Call a function that returns a pointer through its first argument."""
    result = ctypes.c_void_p()
    call(function, ctypes.byref(result), *arguments)
    return result.value or 0


def malloc(size: int) -> int:
    """Allocate device memory on this thread's device."""
    return pointer_from("aclrtMalloc", size, 0)


def free(address: int) -> None:
    """Free device memory."""
    call("aclrtFree", address)


def write(address: int, data: bytes) -> None:
    """Copy host bytes to device memory."""
    call("aclrtMemcpy", address, len(data), data, len(data), HOST_TO_DEVICE)


def read(address: int, size: int) -> bytes:
    """Copy device memory to host bytes."""
    data = ctypes.create_string_buffer(size)
    call("aclrtMemcpy", data, size, address, size, DEVICE_TO_HOST)
    return data.raw


@contextmanager
def memory(size: int) -> Iterator[int]:
    """Device memory for the length of a block."""
    address = malloc(size)
    try:
        yield address
    finally:
        free(address)


@contextmanager
def pinned(size: int) -> Iterator[int]:
    """Pinned host memory for the length of a block."""
    address = pointer_from("aclrtMallocHost", size)
    try:
        yield address
    finally:
        call("aclrtFreeHost", address)


@contextmanager
def stream() -> Iterator[int]:
    """A stream for the length of a block."""
    handle = pointer_from("aclrtCreateStream")
    try:
        yield handle
    finally:
        call("aclrtDestroyStream", handle)


@contextmanager
def event() -> Iterator[int]:
    """An event for the length of a block."""
    handle = pointer_from("aclrtCreateEventExWithFlag", 0)
    try:
        yield handle
    finally:
        call("aclrtDestroyEvent", handle)


def attributes(address: int) -> PointerAttributes:
    """Return what the runtime says of an address."""
    result = PointerAttributes()
    call("aclrtPointerGetAttributes", address, ctypes.byref(result))
    return result
