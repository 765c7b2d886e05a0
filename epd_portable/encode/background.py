"""Overlapped encoding: a prefill+decode worker encodes items next to its steps.

vLLM encodes within a step, which then computes no token until the last item is encoded. On CPUs a
thread encodes, and stops between two modules of the encoder when a step waits: both compute in
turns, whose lengths are in `TURNS`. Devices: `epd_portable.encode.chunks`.

Never do both compute at once: vLLM's kernels for the CPU keep buffers for the whole process, and
cores would be shared.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epd_portable.config.instance import EncodePriority
from epd_portable.items.placer import EncodeOrder
from epd_portable.log import trace

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnLengths:
    """Lengths of turns while steps and the encoder both have something to compute.

    Attributes:
        encoder_s: Seconds of the encoder's turn, which lasts to the end of a module.
        steps: Steps between two turns of the encoder.
        rest_s: Seconds without a step after which none is expected, and the encoder need not wait.
            Between two steps vLLM schedules and sends tokens.
    """

    encoder_s: float
    steps: int
    rest_s: float = 0.0


TURNS: Mapping[EncodePriority, TurnLengths] = {
    "tokens": TurnLengths(encoder_s=0.01, steps=8, rest_s=0.02),
    # A step of a small model takes as long, so both have half of the time.
    "balanced": TurnLengths(encoder_s=0.01, steps=1),
    "images": TurnLengths(encoder_s=math.inf, steps=1),
}


class ComputeTurns:
    """Turns of steps and one encoder; each gets one, however much the other has to compute."""

    def __init__(self, turns: TurnLengths) -> None:
        self._turns = turns
        self._changed = threading.Condition()
        self._stepping = False
        """A step computes, or waits for that."""
        self._encoding = False
        self._asking = False
        """The encoder waits."""
        self._passed = 0
        """Steps for which it has waited."""
        self._stepped_s = 0.0
        """End of the last step, in seconds."""
        self._begun_s = 0.0
        """Begin of the encoder's turn, in seconds."""

    def take_turn(self) -> None:
        """Return as soon as a step may compute."""
        with self._changed:
            self._stepping = True
            self._changed.wait_for(lambda: not (self._encoding or self._is_due()))

    def end_turn(self) -> None:
        """Let the encoder compute, if it is its turn; does nothing outside of a step."""
        with self._changed:
            if self._stepping:
                self._stepping = False
                self._stepped_s = time.monotonic()
                self._passed += self._asking
                self._changed.notify_all()

    @contextmanager
    def encoder(self) -> Iterator[None]:
        """Compute, as soon as no step does."""
        self._begin()
        try:
            yield
        finally:
            self._stop()

    def pause(self) -> None:
        """End a turn that has lasted, if a step waits; the encoder calls this where it can stop."""
        if self._stepping and time.monotonic() - self._begun_s >= self._turns.encoder_s:
            self._stop()
            self._begin()

    def _begin(self) -> None:
        with self._changed:
            self._asking = True
            while not self._may_encode():
                self._changed.wait(self._turns.rest_s or None)
            self._asking, self._passed = False, 0
            self._encoding = True
            self._begun_s = time.monotonic()

    def _is_due(self) -> bool:
        return self._passed >= self._turns.steps

    def _may_encode(self) -> bool:
        if self._is_due():
            return True
        return not self._stepping and time.monotonic() - self._stepped_s >= self._turns.rest_s

    def _stop(self) -> None:
        with self._changed:
            self._encoding = False
            self._changed.notify_all()


class StepEncoder:
    """Encodes at the beginning of the step that orders it, where encoder and steps share a queue.

    Args:
        encode: Returns the output ``(num_embeds, width)`` of an item, or queues its computation.
        priority: What the turns prefer.

    Attributes:
        turns: Steps take them; a step never waits where nothing is encoded next to it.
    """

    def __init__(
        self,
        encode: Callable[[EncodeOrder], torch.Tensor],
        priority: EncodePriority = "balanced",
    ) -> None:
        self.turns = ComputeTurns(TURNS[priority])
        self._encode = encode
        self._asked: list[EncodeOrder] = []
        self._failed: set[str] = set()
        self._placed: set[str] = set()

    def submit(self, encoding: EncodeOrder) -> None:
        """Encode an item with the next call of `place`."""
        self._asked.append(encoding)

    def place(self, encoder_cache: dict[str, torch.Tensor], *, computes: bool = True) -> None:
        """Put the outputs of what was submitted into the worker's encoder cache.

        Args:
            encoder_cache: Outputs ``(num_embeds, width)`` by ``mm_hash``.
            computes: The step that begins has tokens.
        """
        import torch

        asked, self._asked = self._asked, []
        for encoding in asked:
            with torch.inference_mode():
                self._keep(encoding.mm_hash, traced(self._encode, encoding), encoder_cache)

    def wait(self) -> None:
        """Make later work of the current stream wait for what is encoded on another stream."""

    def reset(self) -> None:
        """Let what was submitted until now fail: other weights make other outputs."""
        self._failed.update(self._placed, (each.mm_hash for each in self._asked))
        self._placed.clear()
        self._asked.clear()

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return what has ended since the last call: items that failed, and that were placed."""
        failed, self._failed = self._failed, set()
        placed, self._placed = self._placed, set()
        return failed, placed

    def close(self) -> None:
        """Do nothing: no encoding continues between steps."""

    def _keep(
        self, mm_hash: str, output: torch.Tensor | None, encoder_cache: dict[str, torch.Tensor]
    ) -> None:
        if output is None:
            self._failed.add(mm_hash)
        else:
            encoder_cache[mm_hash] = output
            self._placed.add(mm_hash)


class BackgroundEncoder(StepEncoder):
    """Encodes one item after the other, in the order in which they come, by a thread.

    Args:
        encode: Returns the output ``(num_embeds, width)`` of an item; called by the thread.
        modules: Of the encoder; before each it can stop for a step.
        priority: See `StepEncoder`.
    """

    def __init__(
        self,
        encode: Callable[[EncodeOrder], torch.Tensor],
        modules: Iterable[torch.nn.Module],
        priority: EncodePriority = "balanced",
    ) -> None:
        super().__init__(encode, priority)
        self._resets = 0
        self._orders: queue.SimpleQueue[tuple[int, EncodeOrder] | None] = queue.SimpleQueue()
        """Jobs, each with the number of resets before it."""
        self._ended: queue.SimpleQueue[tuple[int, str, torch.Tensor | None]] = queue.SimpleQueue()
        """Likewise; ``None`` stands for an output that could not be made, which was logged."""
        self._thread = threading.Thread(target=self._work, name="epd-encoder", daemon=True)
        self._hooks = [each.register_forward_pre_hook(self._before) for each in modules]
        self._closing = False
        self._thread.start()

    def submit(self, encoding: EncodeOrder) -> None:
        """Encode an item as soon as those before it are encoded."""
        self._orders.put((self._resets, encoding))

    def place(self, encoder_cache: dict[str, torch.Tensor], *, computes: bool = True) -> None:
        """Put the outputs that are there since the last call into the worker's encoder cache."""
        while not self._ended.empty():
            resets, mm_hash, output = self._ended.get()
            self._keep(mm_hash, output if resets == self._resets else None, encoder_cache)

    def reset(self) -> None:
        """See `StepEncoder`; what is in the encoder is lost when it is put out."""
        super().reset()
        self._resets += 1

    def close(self) -> None:
        """End the thread, after the item that it encodes."""
        self._closing = True
        self._orders.put(None)
        self._thread.join()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, arguments: Any) -> None:
        # A step may encode, too: what is not encoded here.
        if threading.current_thread() is self._thread:
            self.turns.pause()

    def _work(self) -> None:
        import torch

        with torch.inference_mode():
            while (order := self._orders.get()) is not None and not self._closing:
                resets, encoding = order
                output = traced(self._in_turn, encoding) if resets == self._resets else None
                self._ended.put((resets, encoding.mm_hash, output))

    def _in_turn(self, encoding: EncodeOrder) -> torch.Tensor:
        with self.turns.encoder():
            return self._encode(encoding)


def traced(
    encode: Callable[[EncodeOrder], torch.Tensor],
    encoding: EncodeOrder,
    fatal: type[Exception] | tuple[()] = (),
) -> torch.Tensor | None:
    """Return an item's output; ``None`` if it could not be made, which is logged.

    Raises errors of a class that is ``fatal``.
    """
    trace("encode.begin", items=[encoding.mm_hash])
    try:
        return encode(encoding)
    except fatal:
        raise
    except Exception:
        logger.exception("item %s could not be encoded next to the steps", encoding.mm_hash)
        return None
    finally:
        trace("encode.end", items=[encoding.mm_hash])
