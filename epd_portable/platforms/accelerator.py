"""Common parts of NVIDIA and Ascend: torch's device interface under two names."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.multiprocessing import reductions

from epd_portable.errors import PlatformError, PlatformUnavailableError, UnsupportedError
from epd_portable.platforms.base import (
    DeviceEvent,
    MemoryInfo,
    ShareHandle,
    StreamUse,
)
from epd_portable.platforms.collectives_device import CollectivePlatform

_environment_lock = threading.Lock()

_EXPANDABLE_SEGMENT = b"e"
"""Second byte of torch's handle of memory that was mapped piece by piece (torch 2.11 to 2.13)."""


class StreamEvent(DeviceEvent):
    """An event of ``torch.cuda`` or ``torch.npu``."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        _ask_device(self._event.wait)

    def done(self) -> bool:
        return bool(_ask_device(self._event.query))

    def block(self) -> None:
        """Wait in the runtime, without Python's lock."""
        _ask_device(self._event.synchronize)


def _ask_device(question: Callable[[], object]) -> object:
    try:
        return question()
    except RuntimeError as error:
        raise PlatformError(f"device work failed: {error}") from error


class AcceleratorPlatform(CollectivePlatform):
    """A platform whose devices have memory and streams of their own.

    Subclasses name the runtime and supply what the two runtimes do differently.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int], Any] = {}
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def _runtime(self) -> Any:
        """``torch.cuda`` or ``torch.npu``; `PlatformUnavailableError` if it cannot be loaded."""

    @abstractmethod
    def _register_host(self, address: int, nbytes: int) -> None:
        """Page-lock a range."""

    @abstractmethod
    def _unregister_host(self, address: int) -> None:
        """Undo :meth:`_register_host`."""

    @abstractmethod
    def _release_counter(self, ref_counter: bytes, offset: int) -> None:
        """Count one opener of shared memory as gone."""

    @abstractmethod
    def _rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Open shared memory from the arguments of torch's own reduction of a device tensor."""

    @abstractmethod
    def _index_to_open(self, handle: ShareHandle) -> int:
        """Return the device under which the memory of ``handle`` is opened.

        Raises:
            UnsupportedError: No device that this process sees reaches the memory.
        """

    def device_count(self) -> int:
        with self._translated("count the devices"):
            return int(self._runtime.device_count())

    def device(self, index: int) -> torch.device:
        count = self.device_count()
        if not 0 <= index < count:
            variable = str(self.traits.visible_devices_env)
            raise PlatformUnavailableError(
                f"{self.name} device {index} of {count}; this process sees "
                f"{variable}={os.environ.get(variable, '(unset: all)')}"
            )
        return torch.device(self.device_type, index)

    def set_device(self, index: int) -> None:
        device = self.device(index)
        with self._translated(f"use {device}"):
            self._runtime.set_device(device)

    def memory_info(self, index: int) -> MemoryInfo:
        """Query the runtime; creates a context on the device."""
        device = self.device(index)
        with self._translated(f"read the memory of {device}"), self._runtime.device(device):
            free_bytes, total_bytes = self._runtime.mem_get_info(device)
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)

    def stream(self, index: int, use: StreamUse = "copy") -> AbstractContextManager[object]:
        """Return a context on a stream of the device; those of uses have the lowest priority."""
        runtime, key = self._runtime, (use, index)
        if use == "current":
            found = runtime.current_stream(index)
        elif (found := self._streams.get(key)) is None:  # With it, no wait for pinning of memory.
            device = self.device(index)
            with self._translated(f"make a stream on {device}"), self._lock:
                if (found := self._streams.get(key)) is None:
                    found = self._streams[key] = runtime.Stream(device=device)
        context: AbstractContextManager[object] = runtime.stream(found)
        return context

    def record_event(self) -> DeviceEvent:
        with self._translated("record an event"):
            # CUDA lets a thread that waits for it sleep; by default it would spin.
            event = self._runtime.Event(blocking=True)
            event.record()
        return StreamEvent(event)

    def adopt(self, tensor: torch.Tensor) -> None:
        """Register the current stream as a user of the memory, with the caching allocator."""
        with self._translated("hand memory to the current stream"):
            tensor.record_stream(self._runtime.current_stream(tensor.device))

    def pin_host(self, address: int, nbytes: int) -> None:
        with self._translated(f"pin {nbytes} bytes at {address:#x}"):
            self._register_host(address, nbytes)

    def unpin_host(self, address: int) -> None:
        with self._translated(f"unpin {address:#x}"):
            self._unregister_host(address)

    def share_tensor(self, tensor: torch.Tensor) -> ShareHandle:
        """Export the tensor's storage.

        Raises:
            UnsupportedError: The allocator maps memory piece by piece. On NVIDIA openers would need
                the right to take file descriptors from this process, which containers do not give;
                on Ascend they would open it under a device that it is not on.
        """
        with self._translated(f"share memory of {tensor.device}"):
            _, arguments = reductions.reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
        (_, _, _, offset, _, _, index, memory, size, start) = arguments[:10]
        (_, counter, counter_offset, event, event_sync_required) = arguments[10:]
        with self._translated(f"share memory of {tensor.device}"):
            # torch would keep the memory until an opener reports that it has closed it, which one
            # that was killed, or that never came, does not.
            self._release_counter(counter, counter_offset)
        if memory[1:2] == _EXPANDABLE_SEGMENT:
            raise UnsupportedError(
                "device memory in expandable segments cannot be shared: set "
                f"expandable_segments:False in PYTORCH_{self.name.upper()}_ALLOC_CONF, or "
                "transfer.path to shm or tcp"
            )
        return ShareHandle(
            device_type=self.device_type,
            device_uuid=self._uuid(index),
            nbytes=tensor.numel(),
            offset=offset,
            storage=(memory, size, start, counter, counter_offset, event, event_sync_required),
        )

    def open_tensor(self, handle: ShareHandle) -> torch.Tensor:
        """Import the storage and make a tensor over it."""
        if handle.device_type != self.device_type:
            raise ValueError(f"a handle of {handle.device_type} memory, opened on {self.name}")
        memory, counter = handle.storage[:3], handle.storage[3:]
        view = (torch.Size([handle.nbytes]), (1,), handle.offset)
        kind = (torch.storage.TypedStorage, torch.uint8)
        index = self._index_to_open(handle)
        with self._translated(f"open memory of device {handle.device_uuid}, if it is still there"):
            return self._rebuild((torch.Tensor, *view, *kind, index, *memory, False, *counter))

    @contextmanager
    def _translated(self, attempt: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PlatformError(f"{self.name}: cannot {attempt}: {error}") from error

    def _uuid(self, index: int) -> str:
        """Return the name of the physical device; empty where the runtime does not name it."""
        # Not as the current device: that would make a context there, of half a gigabyte on CUDA.
        return str(getattr(self._runtime.get_device_properties(index), "uuid", ""))


@contextmanager
def errors_spare_the_process(*variables: str) -> Iterator[None]:
    """Make a backend that, when its peer dies, drops its communicators and not the process.

    The mode is read from the environment when the backend is made; 2 is ``CleanUpOnly``. The
    engine's groups keep the mode that they were made with.
    """
    # Without the lock, a second thread would restore the first one's setting.
    with _environment_lock:
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ.update(dict.fromkeys(variables, "2"))
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
