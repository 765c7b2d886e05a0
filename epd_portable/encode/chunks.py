"""Overlapped encoding on devices: an item's encoder in chunks, one at the beginning of each step.

A step waits for a chunk of some milliseconds in place of the whole encoder, or, where chunks have
a stream of their own, only for the launch of their kernels. Outputs are those of the whole encoder.

Ranks of one instance agree without messages: chunks are counted in blocks of the encoder, queued in
the order of the steps, and placed by the step of the last one.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from epd_portable.config.instance import EncodePriority
from epd_portable.encode.background import StepEncoder, traced
from epd_portable.items.placer import EncodeOrder

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies

CHUNKS: Mapping[EncodePriority, int] = {"tokens": 1, "balanced": 2}
"""Size of a step's share of the encoder, in chunks. With ``images`` vLLM encodes within a step."""


class CancelledCallError(BaseException):
    """Ends a call that is not resumed any more; no `Exception`, which models may catch."""


class ResumableCalls:
    """Calls that stop halfway and are resumed later, one after the other.

    They are in a thread, because Python suspends no call of other functions within its own thread.
    The thread computes only while `resume` blocks, so never do caller and call compute at once.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._resumed, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._cancels = False

    @property
    def is_caller(self) -> bool:
        """Return whether this is a thread of others."""
        return threading.current_thread() is not self._thread

    def begin(self, call: Callable[[], None]) -> None:
        """Take a call, after the one before has ended; `resume` starts it."""
        self._call = call

    def resume(self) -> bool:
        """Compute until the call stops or ends; return whether it has ended, also before.

        Raises what the call raises.
        """
        if self._call is None:
            return True
        if self._thread.ident is None:
            self._thread.start()
        self._resumed.release()
        self._stopped.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._call is None

    def stop(self) -> None:
        """Let `resume` return; the call does this, and continues with the next `resume`."""
        self._stopped.release()
        self._resumed.acquire()
        if self._cancels:
            raise CancelledCallError

    def cancel(self) -> None:
        """Raise `CancelledCallError` where the call has stopped."""
        self._cancels = True
        while self._call is not None:
            self.resume()
        self._cancels = False

    def close(self) -> None:
        """Cancel the call and end the thread."""
        if self._thread.ident is not None:
            self.cancel()
            self._resumed.release()
            self._thread.join()

    def _run(self) -> None:
        while self._resumed.acquire() and self._call is not None:
            try:
                self._call()
            except BaseException as error:
                if not self._cancels:  # Else its caller wants its end, by whatever error.
                    self._error = error
            self._call = None
            self._stopped.release()


class ChunkEncoder(StepEncoder):
    """Encodes one item after the other, a chunk at the beginning of each step.

    An instance of one rank that computes no tokens encodes an item as a whole. On a stream of its
    own a chunk is launched when the one before has been computed, and an output is placed by the
    first step after that; neither blocks the host.

    Args:
        encode: Returns the output ``(num_embeds, width)`` of an item, or queues its computation.
        blocks: Of the encoder; before each it can stop. Without any an item is one chunk.
        copies: Of the worker's device.
        priority: See `CHUNKS`.
        aside: Chunks have a stream of their own.
        ranks: Of the instance; all have the same orders, and several have no stream for chunks.
    """

    def __init__(
        self,
        encode: Callable[[EncodeOrder], torch.Tensor],
        blocks: Sequence[torch.nn.Module],
        copies: DeviceCopies,
        priority: EncodePriority = "balanced",
        *,
        aside: bool = False,
        ranks: int = 1,
    ) -> None:
        super().__init__(encode, priority)
        self._platform, self._index = copies.platform, copies.index
        self._aside, self._ranks = aside, ranks
        # vLLM calls blocks around torch's hooks (``support_torch_compile``), but not their modules,
        # of which blocks share some.
        counts = Counter(module for block in blocks for module in block.modules())
        self._hooks = [
            module.register_forward_pre_hook(partial(self._before, number))
            for number, block in enumerate(blocks)
            for module in block.modules()
            if counts[module] == 1
        ]
        chunk = CHUNKS[priority] * self._platform.traits.encode_chunk_embeds
        self._blocks_embeds = len(blocks) * chunk
        self._block = -1
        """Number of the block that computes."""
        self._blocks = math.inf
        """Blocks until the call is to stop."""
        self._calls = ResumableCalls("epd-encoder")
        self._encoding: EncodeOrder | None = None
        """An item that was begun and is not placed."""
        self._computed = False
        """Every chunk of that item was queued."""
        self._output: torch.Tensor | None = None
        self._event: DeviceEvent | None = None
        """Behind the last chunk."""
        self._step_encodes = False
        """A step has encoded since the last chunk, with the same buffers."""

    def place(self, encoder_cache: dict[str, torch.Tensor], *, computes: bool = True) -> None:
        """See `StepEncoder`; queue a chunk of what was submitted."""
        if self._encoding is None and not self._asked:
            return
        is_idle = not computes and self._ranks == 1
        if (self._aside or is_idle) and self._event is not None and not self._event.done():
            return
        self._end(encoder_cache)
        if self._encoding is None and self._asked:
            self._begin(self._asked.pop(0))
        if self._encoding is not None:
            embeds = max(1, self._encoding.num_embeds)
            self._blocks = math.inf if is_idle else max(1, self._blocks_embeds // embeds)
            self._wait_for_step()
            self._computed = self._calls.resume()
        if self._output is None or not self._aside:
            self._end(encoder_cache)

    def wait(self) -> None:
        """See `StepEncoder`: vLLM's graphs of an encoder have one set of buffers."""
        self._step_encodes |= self._aside and self._encoding is not None
        if self._aside and self._event is not None:
            self._event.wait()

    def reset(self) -> None:
        """See `StepEncoder`."""
        super().reset()
        if self._encoding is not None:
            self._calls.cancel()
            self._failed.add(self._encoding.mm_hash)
            self._encoding = self._output = None
            self._computed = False

    def close(self) -> None:
        """End the thread; chunks that are queued are computed."""
        self._calls.close()
        for hook in self._hooks:
            hook.remove()

    def _wait_for_step(self) -> None:
        """Let the next chunk wait for a step that has encoded by itself."""
        if self._step_encodes:
            self._step_encodes = False
            encoded = self._platform.record_event()
            with self._platform.stream(self._index, "encode"):
                encoded.wait()

    def _begin(self, encoding: EncodeOrder) -> None:
        # Steps may have changed weights.
        before = self._platform.record_event() if self._aside else None
        stream = self._platform.stream(self._index, "encode" if self._aside else "current")

        def call() -> None:
            import torch

            self._platform.set_device(self._index)
            with stream, torch.inference_mode():
                if before is not None:
                    before.wait()
                fatal = torch.OutOfMemoryError if self._ranks > 1 else ()
                self._output = traced(self._encode, encoding, fatal)
                if self._output is None and self._ranks > 1 and self._block >= 0:
                    # Other ranks have its chunks in later steps, or wait within the encoder.
                    raise RuntimeError(
                        f"item {encoding.mm_hash} could not be encoded by one of {self._ranks} "
                        "ranks, which compute the same; see the error before"
                    )
                self._event = self._platform.record_event()

        self._encoding, self._computed, self._output, self._block = encoding, False, None, -1
        self._calls.begin(call)

    def _end(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Place the item whose last chunk was queued, if there is one."""
        if self._encoding is None or not self._computed:
            return
        if self._aside and self._output is not None:
            assert self._event is not None
            self._event.wait()
            self._platform.adopt(self._output)
        self._keep(self._encoding.mm_hash, self._output, encoder_cache)
        self._encoding = self._output = None
        self._computed = False

    def _before(self, block: int, module: torch.nn.Module, arguments: Any) -> None:
        # A step may encode as well: what is not encoded here.
        if self._calls.is_caller or block == self._block:
            return
        self._block = block
        if self._blocks == 0:
            self._event = self._platform.record_event()
            self._calls.stop()
        self._blocks -= 1
