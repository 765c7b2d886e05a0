"""Ends of transfers in processes of their own, which a test can make slow, and kill."""

from __future__ import annotations

import ast
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from ascend_sim.memory import delay

from epd_portable.connector import copies
from epd_portable.connector.producer import TransferOrder
from epd_portable.platforms.collectives_torch import TorchCollectiveGroup
from epd_portable.wire.descriptors import TensorSpec
from tests.integration.transfer.encode_side import make_sender
from tests.npu_sim.platform.children import Child

DEADLINE_S = 30.0


class EncodeWorker(logging.Handler):
    """Runs in the process: a real sender on the first device, and what it has logged."""

    def __init__(self, path: str, wait_timeout_s: float) -> None:
        super().__init__()
        self._said: deque[str] = deque()
        logging.getLogger("epd_portable").addHandler(self)
        self._writing = threading.Event()
        # The device gets the copy of `ipc`; both ends have agreed on the item of `collective`.
        _tell(self._writing, copies.DeviceCopies, "queue")
        _tell(self._writing, TorchCollectiveGroup, "_move_out")
        self._sender = make_sender(path, wait_timeout_s, "npu")
        self._ended: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def take_said(self) -> list[str]:
        """Return what was logged since the last call; other threads may be logging."""
        return [self._said.popleft() for _ in range(len(self._said))]

    def order(
        self, transfer_id: str, mm_hash: str, consumer: str, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Announce an item."""
        order = TransferOrder(
            transfer_id=transfer_id,
            mm_hash=mm_hash,
            consumer=consumer,
            tensor=TensorSpec(shape=shape, dtype=dtype),
        )
        self._sender.submit(order, None)

    def put_out(self, mm_hash: str, output: torch.Tensor, late_us: int = 0) -> None:
        """Put an item out, whose computation ends so much later."""
        self._writing.clear()
        on_device = output.to("npu:0")
        # Not the whole device: that would raise what a broken group has left on its own stream.
        torch.npu.current_stream().synchronize()
        delay(torch.npu.current_stream(), late_us)
        self._sender.output_ready(mm_hash, on_device)

    def wait_until_writing(self) -> None:
        assert self._writing.wait(DEADLINE_S), "nothing is written"

    def wait_until_ended(self, transfer_id: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while transfer_id not in self._ended:
            assert time.monotonic() < deadline_s, "the transfer has not ended"
            self._ended |= self._sender.take_ended()
            time.sleep(0.001)

    def finish(self) -> None:
        self._sender.close()


def _tell(event: threading.Event, owner: Any, name: str) -> None:
    """Set an event whenever something is called."""
    real: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(real)
    def told(*args: Any, **options: Any) -> Any:
        event.set()
        return real(*args, **options)

    setattr(owner, name, told)


class Encode:
    """The test's end of an encode worker."""

    def __init__(self, path: str, wait_timeout_s: float = 20.0, **settings: str) -> None:
        self._child = Child(**settings)
        do(self._child, "from tests.npu_sim.transfer.ends import EncodeWorker")
        do(self._child, "from tests.integration.transfer.encode_side import output")
        do(self._child, f"worker = EncodeWorker({path!r}, {wait_timeout_s})")

    def order(
        self,
        transfer_id: str,
        mm_hash: str,
        consumer: str,
        shape: tuple[int, ...],
        dtype: str = "float32",
    ) -> None:
        words = (transfer_id, mm_hash, consumer, shape, dtype)
        do(self._child, f"worker.order(*{words!r})")

    def put_out(self, mm_hash: str, output: str, late_us: int = 0) -> None:
        """Put out what an expression yields."""
        do(self._child, f"worker.put_out({mm_hash!r}, {output}, {late_us})")

    def wait_until_writing(self) -> None:
        do(self._child, "worker.wait_until_writing()")

    def wait_until_ended(self, transfer_id: str) -> None:
        do(self._child, f"worker.wait_until_ended({transfer_id!r})")

    def said(self) -> str:
        """What it has logged since the last call."""
        said: list[str] = ast.literal_eval(self._child.tell("worker.take_said()"))
        return "\n".join(said)

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        if self._child.process.poll() is None:
            do(self._child, "worker.finish()")
        self._child.__exit__(None, None, None)


def do(child: Child, code: str) -> None:
    """Run a statement, or an expression without a value, which must not fail."""
    answer = child.tell(code)
    assert answer in ("done", "None"), answer
