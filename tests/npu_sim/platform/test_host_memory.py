"""Page-locking memory that torch did not allocate, as the receive pools in /dev/shm are."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from epd_portable.errors import PlatformError, UnsupportedError
from epd_portable.platforms.base import Platform
from tests.npu_sim.platform.children import run

NBYTES = 1 << 20


@pytest.fixture
def shared() -> Iterator[tuple[int, torch.Tensor]]:
    """Yield an address in a file of /dev/shm, and a tensor over it."""
    path = Path("/dev/shm") / f"epd-test-pin-{os.getpid()}"
    with path.open("xb+") as file:
        path.unlink()
        file.truncate(NBYTES)
        area = mmap.mmap(file.fileno(), NBYTES)
    tensor = torch.frombuffer(area, dtype=torch.uint8)
    yield ctypes.addressof(ctypes.c_char.from_buffer(area)), tensor
    del tensor


@pytest.fixture(params=["torch_npu 2.13", "torch_npu 2.10"])
def platform(
    request: pytest.FixtureRequest, npu: Platform, monkeypatch: pytest.MonkeyPatch
) -> Platform:
    if request.param == "torch_npu 2.10":
        monkeypatch.delattr(torch.npu, "npurt")
    return npu


def runtime_knows(address: int) -> bool:
    """Ask the runtime itself whether memory is page-locked host memory."""

    class Attributes(ctypes.Structure):
        _fields_ = (
            ("device", ctypes.c_uint32),
            ("kind", ctypes.c_uint32),
            ("rest", ctypes.c_uint32 * 30),
        )

    host, unregistered = 0, 2
    found = Attributes()
    library = ctypes.CDLL("libascendcl.so")
    assert library.aclrtPointerGetAttributes(ctypes.c_void_p(address), ctypes.byref(found)) == 0
    assert found.kind in (host, unregistered)
    return found.kind == host


def test_pinned_range_is_known_to_its_last_byte_until_unpinned(
    platform: Platform, shared: tuple[int, torch.Tensor]
) -> None:
    address, _ = shared
    assert not runtime_knows(address)
    platform.pin_host(address, NBYTES)
    try:
        assert runtime_knows(address)
        assert runtime_knows(address + NBYTES - 1)
        assert not runtime_knows(address + NBYTES)
    finally:
        platform.unpin_host(address)
    assert not runtime_knows(address)


def test_a_range_can_be_pinned_again_after_it_was_unpinned(
    platform: Platform, shared: tuple[int, torch.Tensor]
) -> None:
    for _ in range(3):
        platform.pin_host(shared[0], NBYTES)
        platform.unpin_host(shared[0])


def test_unpinning_what_is_not_pinned_is_an_error(
    platform: Platform, shared: tuple[int, torch.Tensor]
) -> None:
    with pytest.raises(PlatformError, match="refused to unregister"):
        platform.unpin_host(shared[0])
    platform.pin_host(shared[0], NBYTES)
    with pytest.raises(PlatformError, match="refused to unregister"):
        platform.unpin_host(shared[0] + 4096)
    platform.unpin_host(shared[0])


def test_a_thread_that_never_used_a_device_can_pin(
    platform: Platform, shared: tuple[int, torch.Tensor]
) -> None:
    failures: list[BaseException] = []

    def attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except PlatformError as error:
            failures.append(error)

    def pin_and_unpin() -> None:
        attempt(lambda: platform.pin_host(shared[0], NBYTES))
        attempt(lambda: platform.unpin_host(shared[0]))

    thread = threading.Thread(target=pin_and_unpin)
    thread.start()
    thread.join(20)
    assert failures == []


def test_without_either_way_pinning_says_what_is_needed(
    npu: Platform, shared: tuple[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.delattr(torch.npu, "npurt")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match=r"torch_npu 2\.11 or CANN's libascendcl\.so"):
        npu.pin_host(shared[0], NBYTES)


def test_library_of_fallback_is_found_without_search_path() -> None:
    printed = run(
        """
import mmap, ctypes, torch
from epd_portable.platforms import registry
npu = registry.get("npu")
del torch.npu.npurt
area = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
npu.pin_host(address, 4096)
npu.unpin_host(address)
print("@@ ok")
""",
        LD_LIBRARY_PATH=None,
    )
    assert "@@ ok" in printed
