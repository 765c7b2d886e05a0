"""Calls of CUDA, with a fake at its border: no device is needed, and none is used."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from epd_portable.errors import PlatformError, UnsupportedError
from epd_portable.platforms.base import ShareHandle
from epd_portable.platforms.cuda import CudaPlatform

PAGE = 4096
REFUSED = 2


class Runtime:
    """The CUDA runtime as torch and ctypes show it; keeps the last error until it is asked for."""

    def __init__(self) -> None:
        self.code = 0
        self.pending = 0

    def call(self, *arguments: int) -> int:
        self.pending = self.code or self.pending
        return self.code

    cudaHostRegister = cudaHostUnregister = call

    def cudaGetLastError(self) -> int:
        self.pending, found = 0, self.pending
        return found


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    libraries = {"libcudart.so.13": made}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    return made


def test_refused_registration_leaves_no_error_for_next_kernel(runtime: Runtime) -> None:
    runtime.code = REFUSED
    with pytest.raises(PlatformError, match=r"refused 4096 bytes at 0x1000 with error 2.*ulimit"):
        CudaPlatform().pin_host(PAGE, PAGE)
    assert runtime.pending == 0


def test_a_refused_end_of_a_registration_leaves_none_either(runtime: Runtime) -> None:
    platform = CudaPlatform()
    platform.pin_host(PAGE, PAGE)
    runtime.code = REFUSED
    with pytest.raises(PlatformError, match="cudaHostUnregister refused"):
        platform.unpin_host(PAGE)
    assert runtime.pending == 0


class TwoGpus(CudaPlatform):
    """CUDA with two devices, on which nobody may make a context."""

    _runtime = SimpleNamespace(
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
    )


def handle(device_uuid: str = "uuid-1") -> ShareHandle:
    storage = (b"\x02c" + bytes(64), 8, 0, b"", 0, b"", False)
    return ShareHandle(
        device_type="cuda", device_uuid=device_uuid, nbytes=8, offset=0, storage=storage
    )


def test_memory_is_opened_on_the_device_of_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *given: opened.append(given[6]))
    TwoGpus().open_tensor(handle())
    assert opened == [1]


def test_memory_of_a_device_that_is_not_visible_is_never_opened() -> None:
    with pytest.raises(UnsupportedError, match=r"uuid-7 is not visible.*CUDA_VISIBLE_DEVICES"):
        TwoGpus().open_tensor(handle(device_uuid="uuid-7"))


class Stream:
    """A stream with a priority, and the streams for which it waits."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.waits: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


def test_steps_get_a_stream_of_highest_priority() -> None:
    current = [Stream()]
    runtime = SimpleNamespace(
        Stream=Stream,
        device_count=lambda: 1,
        current_stream=lambda *_: current[0],
        set_stream=lambda stream: current.__setitem__(0, stream),
        stream=lambda stream: stream,
    )
    before = current[0]
    platform = type("OneGpu", (CudaPlatform,), {"_runtime": runtime})()
    encode: Any = platform.stream(0, "encode")
    assert platform.stream(0, "encode") is encode
    assert platform.stream(0) is not encode
    assert platform.stream(0, "current") is before
    platform.raise_current_stream()
    assert (current[0].priority, current[0].waits) == (-5, [before])
    assert platform.stream(0, "current") is current[0]
    assert encode.priority == 0
