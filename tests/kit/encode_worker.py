"""The worker half of an encode instance over a fake device, without threads and sockets.

Real: `EncodeWorker`, its `Sender` with all outputs, orders and messages, and `HostCopies`. Fake:
threads, which go on when a test says so; the control channel; paths, which read an output
when its write ends; and the device. It computes what was queued later, in the order of the queue,
and its copy stream is ahead of that. An encoder output is a tensor full of the number of its
weights, and of `UNCOMPUTED` before it is computed. Not modelled: the device's memory, and failures
of the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from epd_portable.encode.writers import WriteResult
from epd_portable.errors import TransportError
from epd_portable.platforms.base import MemoryInfo
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.wire.messages import AnyMessage, Written
from tests.kit.memory import Violation
from tests.unit.builders import Clock

UNCOMPUTED = -1


class Device:
    """Work that is queued, and computed when a test says so; at once on the CPU."""

    def __init__(self, *, is_late: bool) -> None:
        self.is_late = is_late
        self._queue: deque[Callable[[], object]] = deque()
        self.queued = self.computed = 0

    def queue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self.queued += 1
        if not self.is_late:
            self.compute()

    def compute(self, most: int = 10**9) -> None:
        """Do so much of the work that is queued."""
        while self._queue and most > 0:
            self._queue.popleft()()
            self.computed += 1
            most -= 1

    @property
    def is_idle(self) -> bool:
        return not self._queue


@dataclass(eq=False)
class Event:
    """A `DeviceEvent`: so much work has been computed."""

    device: Device
    point: int

    def done(self) -> bool:
        return self.device.computed >= self.point

    def wait(self) -> None:
        """Work of the copy stream that is queued later waits: it is read when a write ends."""

    def block(self) -> None:
        assert self.done(), "threads of the kit wait for no device"


class Platform:
    """A `Platform` in host memory, with the traits of a device or of the CPU."""

    name = "fake"

    def __init__(self, device: Device, fails: Callable[[], bool]) -> None:
        traits = TRAITS["npu" if device.is_late else "cpu"]
        self.traits = replace(traits, needs_device_copy=device.is_late)
        self._device, self._fails = device, fails

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Do nothing, with one device only."""

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(free_bytes=0, total_bytes=0)

    def record_event(self) -> Event:
        return Event(self._device, self._device.queued)

    def stream(self, index: int) -> AbstractContextManager[None]:
        """Copies are made at once: nothing that is queued for computing holds them up."""
        if self._fails():
            raise torch.OutOfMemoryError("a fault of the test")
        return nullcontext()

    def adopt(self, tensor: torch.Tensor) -> None:
        """Memory is the host's."""


class FakeClock:
    """`StreamClock` without its thread: points are reached as the device computes."""

    def __init__(self, copies: DeviceCopies, name: str) -> None:
        self._device: Device = copies.platform._device  # type: ignore[attr-defined]

    def mark(self, reached: Callable[[float], None], event: Any = None) -> None:
        self._device.queue(lambda: reached(0.0))

    def trace(self, event: str, **fields: Any) -> None:
        """No trace is on."""

    def check(self) -> None:
        """The device works."""

    def close(self) -> None:
        """No thread is open."""


class Later:
    """An executor of one thread: jobs wait until a test has the next one done."""

    def __init__(self, *names: Any) -> None:
        self._jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def submit(self, job: Callable[..., None], *given: Any) -> None:
        self._jobs.append((job, given))

    def next(self) -> None:
        """Do the first job, if what it waits for is computed."""
        if self._jobs and self._jobs[0][1][-1].done():
            job, given = self._jobs.popleft()
            job(*given)

    def shutdown(self, **how: Any) -> None:
        self._jobs.clear()


class Control:
    """`ControlClients`: messages lie in lists."""

    def __init__(self, send: Callable[[str, AnyMessage], None]) -> None:
        self.send = send
        self.inbox: list[tuple[str, AnyMessage]] = []

    def receive(self) -> list[tuple[str, AnyMessage]]:
        received, self.inbox = self.inbox, []
        return received

    def wake(self) -> None:
        """No thread sleeps."""


class Writers:
    """`Writers` without threads: a write reads its output when it ends."""

    are_immediate = True

    def __init__(self, on_result: Callable[[WriteResult], None]) -> None:
        self._on_result = on_result
        self.lasts: Callable[[], int] = lambda: 0
        """Turns that a write lasts."""
        self.fails: Callable[[], bool] = lambda: False
        self.written: dict[int, int] = {}
        """Content of what was written last, by attempt."""
        self._under_way: list[list[Any]] = []

    def start(self, write: Any) -> WriteResult | None:
        if write.output is None:
            return WriteResult(write=write, error=TransportError("its output is not there"))
        turns = self.lasts()
        if turns == 0 and write.output.computed.done():
            return self._end(write)
        self._under_way.append([turns, write])
        return None

    def turn(self) -> None:
        """Let writes go on for a turn."""
        for each in list(self._under_way):
            each[0] -= 1
            if each[0] < 0 and each[1].output.computed.done():
                self._under_way.remove(each)
                self._on_result(self._end(each[1]))

    def _end(self, write: Any) -> WriteResult:
        if self.fails():
            return WriteResult(write=write, error=TransportError("a fault of the test"))
        self.written[write.attempt] = content_of(write.output.tensor)
        return WriteResult(write=write)


def content_of(output: torch.Tensor) -> int:
    """Return the weights that made an output."""
    (content,) = {int(each) for each in output.unique().tolist()}
    return content


class EncodeWorkerHalf:
    """A worker of an encode instance.

    Args:
        config: vLLM's.
        is_late: The device computes later than work is queued.
        deliver: Takes the messages to consumers, with their addresses.

    Attributes:
        cache: vLLM's encoder cache, by ``mm_hash``.
        weights: Their number, until the next `reset`.
        no_copy: Whether a copy in host memory cannot be made.
        no_memory: Whether there is no memory to restore one.
    """

    def __init__(
        self,
        config: Any,
        clock: Clock,
        deliver: Callable[[str, AnyMessage], None],
        *,
        is_late: bool = False,
    ) -> None:
        self.device = Device(is_late=is_late)
        self.cache: dict[str, torch.Tensor] = {}
        self.weights = 0
        self._ended_at = 0
        """All that was queued when the step before ended."""
        self.no_copy: Callable[[], bool] = lambda: False
        self.no_memory: Callable[[], bool] = lambda: False
        self._deliver = deliver
        self._platform = Platform(self.device, lambda: self.no_memory())
        self._clock = clock
        self._made: dict[str, Any] = {}
        self._violations: list[str] = []
        """Violations by messages: the sender survives errors where they are sent."""
        with self.seams():
            self._open(config)

    def _open(self, config: Any) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        from epd_portable.vllm_plugin.ec_connector import EPDConnector

        self.connector: Any = EPDConnector(config, ECConnectorRole.WORKER)
        self.connector.open_worker(torch.device("cpu"), 0)
        self.writers: Writers = self._made["writers"]
        self._control: Control = self._made["control"]
        self._copies: Later = self._made.get("copies", Later())
        self._sender = self.connector._sender

    @contextmanager
    def seams(self) -> Iterator[None]:
        """Put the kit's parts in the place of threads, sockets and the device."""
        from epd_portable.encode import host_copies, sender
        from epd_portable.platforms import registry
        from epd_portable.vllm_plugin import compat, ec_connector, exposition

        made = self._made
        alone = host_copies.alone

        def copy(output: torch.Tensor) -> torch.Tensor:
            if self.no_copy():
                raise torch.OutOfMemoryError("a fault of the test")
            return alone(output)

        def new_writers(*given: Any, on_result: Any, on_death: Any) -> Writers:
            made["writers"] = Writers(on_result)
            return made["writers"]

        def new_control(*given: Any) -> Control:
            made["control"] = Control(self._send)
            return made["control"]

        def new_copies(*given: Any) -> Later:
            made["copies"] = Later()
            return made["copies"]

        idle = SimpleNamespace(start=lambda: None, join=lambda *given: None)
        threads = SimpleNamespace(
            Lock=threading.Lock, Thread=lambda **how: idle, current_thread=threading.current_thread
        )
        patches = (
            (sender, "threading", threads),
            (sender, "time", SimpleNamespace(monotonic=self._clock)),
            (sender, "StreamClock", FakeClock),
            (sender, "Writers", new_writers),
            (sender, "ControlClients", new_control),
            (host_copies, "ThreadPoolExecutor", new_copies),
            (host_copies, "alone", copy),
            (registry, "get", lambda name: self._platform),
            (ec_connector, "limit_compute", lambda *given: None),
            (ec_connector, "_REST_S", 0.0),
            (compat, "check_dtype", lambda *given: None),
            (exposition, "publish", lambda: None),
        )
        found = [mock.patch.object(where, name, value) for where, name, value in patches]
        for each in found:
            each.start()
        try:
            yield
        finally:
            for each in reversed(found):
                each.stop()

    # -- steps -------------------------------------------------------------------------------------

    def begin(self, planned: Any) -> list[str]:
        """Begin a step; return what was to be restored and is not there."""
        metadata = planned.ec_connector_metadata
        self.connector.begin_step(metadata, self.cache)
        for name in planned.free_encoder_mm_hashes:
            self.cache.pop(name, None)
        return [name for name in metadata.copies.restored if name not in self.cache]

    def encode(self, name: str, size: int, width: int) -> None:
        """Encode an item."""
        output = torch.full((size, width), float(UNCOMPUTED))
        weights = self.weights
        with self.connector.encoding([name]):
            self.device.queue(partial(output.fill_, weights))
            self.cache[name] = output
        self.connector.save_caches(self.cache, name)

    def run_out_of_memory(self, name: str) -> None:
        """Find no memory to encode an item."""
        with self.connector.encoding([name]):
            raise torch.OutOfMemoryError("a fault of the test")

    def end(self) -> Any:
        """End a step; return vLLM's ``ECConnectorOutput``, or nothing."""
        self.device.compute(self._ended_at - self.device.computed)  # It would be waited for.
        report = self.connector.end_step()
        self._ended_at = self.device.queued
        return report

    def reset(self) -> None:
        """Do what vLLM's worker does when weights change, and change them."""
        self.cache.clear()
        self.connector.reset()
        self.weights += 1

    # -- threads -----------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """Return whether transfers are under way."""
        return len(self._sender._session) > 0 or bool(self._sender._inbox)

    def receive(self, address: str, message: AnyMessage) -> None:
        """Let a message of a consumer arrive."""
        self._control.inbox.append((address, message))

    def turn(self) -> None:
        """Let the sender's thread take a turn."""
        self.writers.turn()
        self._sender._take_turn(blocking=True)
        if self._violations:
            raise Violation(self._violations[0])

    def copy(self) -> None:
        """Let the next copy be made in host memory."""
        self._copies.next()

    def check(self) -> None:
        """Compare the encoder cache with what this worker's weights put out."""
        if not self.device.is_idle:
            return
        for name, output in self.cache.items():
            if content_of(output) != self.weights:
                raise Violation(f"{name} is in the encoder cache as {content_of(output)} made it")

    def _send(self, address: str, message: AnyMessage) -> None:
        if isinstance(message, Written):
            sent = self.writers.written[message.attempt]
            if sent != self.weights:
                self._violations.append(
                    f"{message.transfer_id} brings what weights {sent} made, not {self.weights}"
                )
        self._deliver(address, message)


def drawn_turns(rng: Random) -> int:
    """Draw how long a write lasts."""
    return rng.choice((0, 0, 0, 1, 4))
