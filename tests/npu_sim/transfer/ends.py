"""Ends of transfers in processes of their own, which a test can make slow, and kill."""

from __future__ import annotations

import ast
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ascend_sim.memory import delay

from epd_portable.encode.producer import ProducerSession, TransferOrder
from epd_portable.transfer import copies
from epd_portable.transfer.paths.collective import CollectiveWriter
from epd_portable.wire.descriptors import TensorSpec
from tests.kit.encode_side import make_sender
from tests.npu_sim.platform.children import Child

DEADLINE_S = 30.0
Note = tuple[str, str, float]


class EncodeWorker(logging.Handler):
    """Runs in the process: a real sender on the first device, and what it has logged."""

    def __init__(self, path: str, wait_timeout_s: float) -> None:
        super().__init__()
        self._said: deque[str] = deque()
        logging.getLogger("epd_portable").addHandler(self)
        self._writing = threading.Event()
        self.notes: list[Note] = []
        # The device gets the copy of `ipc`; of `collective` the item is waited for to be computed.
        _tell(self._writing.set, copies.DeviceCopies, "queue")
        _tell(self._writing.set, CollectiveWriter, "write")
        _tell(functools.partial(self._note, "queued"), copies.DeviceCopies, "queue")
        _tell(functools.partial(self._note, "written"), ProducerSession, "write_ended")
        self._sender = make_sender(path, wait_timeout_s, "npu")
        self._ended: set[str] = set()

    def _note(self, what: str) -> None:
        self.notes.append((what, threading.current_thread().name.rstrip("0123456789-"), _now_s()))

    def take_notes(self) -> list[Note]:
        """Return what was done since the last call: what, by which thread, when."""
        notes, self.notes = self.notes, []
        return notes

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
        self.put_out_all({mm_hash: output}, late_us)

    def put_out_all(self, outputs: dict[str, torch.Tensor], late_us: int) -> float:
        """Put items out, each so much later computed than the last; return the seconds."""
        self._writing.clear()
        on_device = {mm_hash: output.to("npu:0") for mm_hash, output in outputs.items()}
        # Not the whole device: that would raise what a broken group has left on its own stream.
        torch.npu.current_stream().synchronize()
        begin_s = _now_s()
        for mm_hash, output in on_device.items():
            delay(torch.npu.current_stream(), late_us)
            self._sender.output_ready(mm_hash, output)
        return _now_s() - begin_s

    def wait_until_granted(self, transfer_id: str) -> None:
        deadline_s = _now_s() + DEADLINE_S
        transfers = self._sender._session._transfers.values()
        [transfer] = [each for each in transfers if each.order.transfer_id == transfer_id]
        while transfer.grant is None:
            assert _now_s() < deadline_s, "it has not been granted"
            time.sleep(0.001)

    def wait_until_writing(self) -> None:
        assert self._writing.wait(DEADLINE_S), "nothing is written"

    def wait_until_ended(self, transfer_id: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while transfer_id not in self._ended:
            assert time.monotonic() < deadline_s, "the transfer has not ended"
            self._ended |= self._sender.progress.take_ended()
            time.sleep(0.001)
        # A later transfer may have the same id.
        self._ended.discard(transfer_id)

    def finish(self) -> None:
        self._sender.close()


def _now_s() -> float:
    return time.monotonic()


def _tell(who: Callable[[], None], owner: Any, name: str) -> None:
    """Tell somebody whenever something is called."""
    real: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(real)
    def told(*args: Any, **options: Any) -> Any:
        who()
        return real(*args, **options)

    setattr(owner, name, told)


class Encode:
    """The test's end of an encode worker."""

    def __init__(self, path: str, wait_timeout_s: float = 20.0, **settings: str) -> None:
        self._child = Child(**settings)
        do(self._child, "from tests.npu_sim.transfer.ends import EncodeWorker")
        do(self._child, "from tests.kit.encode_side import output")
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

    def put_out_all(self, names: Sequence[str], num_tokens: int, late_us: int) -> float:
        """Put items out, one so much later than the other; return the seconds that this took."""
        outputs = ", ".join(f"{name!r}: output({name!r}, {num_tokens})" for name in names)
        return float(self._child.tell(f"worker.put_out_all({{{outputs}}}, {late_us})"))

    def wait_until_granted(self, transfer_id: str) -> None:
        do(self._child, f"worker.wait_until_granted({transfer_id!r})")

    def notes(self) -> list[Note]:
        """Return the copies queued and the ends reported since the last call, with threads."""
        notes: list[Note] = ast.literal_eval(self._child.tell("worker.take_notes()"))
        return notes

    def run(self, code: str) -> None:
        """Run a statement in its process, which has it as ``worker``."""
        do(self._child, code)

    def wait_until_writing(self) -> None:
        do(self._child, "worker.wait_until_writing()")

    def wait_until_ended(self, transfer_id: str) -> None:
        do(self._child, f"worker.wait_until_ended({transfer_id!r})")

    def said(self) -> str:
        """Return the log since the last call."""
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
