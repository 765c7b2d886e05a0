"""Ranks of the simulated HCCL, called through ctypes; imports no torch.

Ranks are threads of one process, each with a stream of its own, or one in each of several
processes.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from . import acl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

SUCCESS, PARA, NOT_SUPPORT, TIMEOUT, REMOTE = 0, 1, 5, 9, 21
INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16 = range(12)
SUM, PROD, MAX, MIN = range(4)
SEND, RECV = 0, 1
ROOT_BYTES = 4108
DEADLINE_S = 120


class Item(ctypes.Structure):
    """``HcclSendRecvItem``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_int),
        ("peer", ctypes.c_uint32),
    )


def new_root() -> bytes:
    """Return what ranks need to find each other."""
    root = ctypes.create_string_buffer(ROOT_BYTES)
    acl.call("HcclGetRootInfo", root)
    return root.raw


@dataclass
class Rank:
    """A rank: its communicator, a stream, and the device memory that it allocated."""

    number: int
    communicator: int
    stream: int
    allocated: list[int] = field(default_factory=list)

    def device_memory(self, data: bytes) -> int:
        """Return new device memory with these bytes, freed with the rank."""
        address = acl.malloc(max(len(data), 1))
        self.allocated.append(address)
        if data:
            acl.write(address, data)
        return address

    def start(self, function: str, *arguments: object) -> int:
        """Call an operation on the rank's stream; its code of HCCL."""
        return acl.code_of(function, *arguments, self.communicator, self.stream)

    def wait(self) -> int:
        """Wait for the stream; the code that it gives."""
        return acl.code_of("aclrtSynchronizeStream", self.stream)

    def do(self, function: str, *arguments: object) -> None:
        """Call an operation that must succeed, and wait for it."""
        code = self.start(function, *arguments)
        if code == SUCCESS:
            code = self.wait()
        if code != SUCCESS:
            raise acl.RuntimeCallError(function, code, acl.message())

    def state(self) -> int:
        """Return what the communicator says of its failed work."""
        result = ctypes.c_int(-1)
        acl.call("HcclGetCommAsyncError", self.communicator, ctypes.byref(result))
        return result.value


@contextmanager
def join(root: bytes, ranks: int, number: int) -> Iterator[Rank]:
    """Join a communicator, on a device of the rank's own if there is one.

    Raises:
        acl.RuntimeCallError: The others did not come in time.
    """
    acl.call("aclrtSetDevice", number % 2)
    communicator = ctypes.c_void_p()
    acl.call("HcclCommInitRootInfo", ranks, root, number, ctypes.byref(communicator))
    with acl.stream() as stream:
        rank = Rank(number, communicator.value or 0, stream)
        try:
            yield rank
        finally:
            if rank.communicator:
                acl.call("HcclCommDestroy", rank.communicator)
            acl.code_of("aclrtSynchronizeStream", stream)
            for address in rank.allocated:
                acl.free(address)


def on_ranks(count: int, work: Callable[[Rank], T]) -> list[T]:
    """Run work as each rank of a new communicator, in threads; what each returned."""
    root = new_root()

    def run(number: int) -> T:
        with join(root, count, number) as rank:
            return work(rank)

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, number) for number in range(count)]
        return [future.result(DEADLINE_S) for future in futures]
