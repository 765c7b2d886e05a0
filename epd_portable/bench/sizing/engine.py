"""The simulated engine: steps of prefill, decode and, where it has the pictures, encode.

One class is both kinds of instance. A one-process replica encodes all pictures itself; a
prefill+decode instance waits for those that come from an encoder, and may encode some.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.timeline import FifoServer, Process, Timeline
from epd_portable.bench.sizing.workload import SimulatedRequest


@dataclass(kw_only=True, slots=True, eq=False)
class _Sequence:
    """A request within the engine.

    Attributes:
        item: Index of the picture whose tokens come next.
        of_item: Tokens of that picture that are computed.
        text_left: Text tokens that are not computed.
        started: It holds one of the engine's ``max_num_seqs`` places.
    """

    request: SimulatedRequest
    item: int = 0
    of_item: float = 0.0
    text_left: int
    started: bool = False

    @property
    def waits(self) -> bool:
        """Whether nothing more can be computed before a picture comes from an encoder."""
        items = self.request.items
        if self.item == len(items):
            return False
        return not (items[self.item].encoded or items[self.item].here)


class SimulatedEngine:
    """Continuous batching with chunked prefill, as vLLM's scheduler does it.

    Every step takes one token of each sequence that generates, then prompt tokens in the order of
    arrival up to the limit of tokens. Pictures are encoded in the step that computes their first
    token, before it, and all sequences wait. Steps that only decode are counted many at a time, so
    a simulation takes time by the request and not by the token.

    Args:
        on_first: Called when a request's first token is computed.
        on_last: Called when its last one is.

    Attributes:
        front_end: Serves requests before they reach the engine.
        encode_s: Time of its steps that went into encoding.
        compute_s: Time of its steps that went into prefill and decode.
        pending_encode_s: Encoding and prefill that it was asked for and has not begun.
        steps: Number of steps so far.
    """

    def __init__(
        self,
        timeline: Timeline,
        times: StageTimes,
        *,
        on_first: Callable[[SimulatedRequest], None],
        on_last: Callable[[SimulatedRequest], None],
    ) -> None:
        self._timeline = timeline
        self._times = times
        self._on_first = on_first
        self._on_last = on_last
        self.front_end = FifoServer(timeline)
        self.preprocessing = FifoServer(timeline)
        self.encode_s = 0.0
        self.compute_s = 0.0
        self.pending_encode_s = 0.0
        self.steps = 0
        self._queue: deque[_Sequence] = deque()
        self._waiting: dict[SimulatedRequest, _Sequence] = {}
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        """Sequences that generate, by the step of their last token."""
        self._places = times.engine.max_num_seqs
        self._begun = 0
        # Planned steps; `_plan` tells their end from that of steps that were cut short.
        self._plan = 0
        self._busy = False
        self._only_decode = False
        self._since_s = 0.0
        self._step_s = self._compute_step_s = 0.0
        self._planned = 0
        self._prefilled: list[SimulatedRequest] = []

    @property
    def computes_for(self) -> bool:
        """Whether a step is under way."""
        return self._busy

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request in, by way of the API server."""
        times = self._times
        tokens = request.text_tokens + sum(item.embeddings for item in request.items)
        self.pending_encode_s += times.prefill.per_token_s * tokens + sum(
            times.encode.seconds(item.embeddings) for item in request.items if item.here
        )
        self._timeline.start(self._arrival(request))

    def landed(self, request: SimulatedRequest) -> None:
        """Go on with a request one of whose pictures has come."""
        sequence = self._waiting.get(request)
        if sequence is not None and not sequence.waits:
            del self._waiting[request]
            self._ready(sequence)

    def _arrival(self, request: SimulatedRequest) -> Process:
        front_end = self._times.front_end
        yield self.front_end.accept(front_end.request_s)
        if request.items:
            yield self.preprocessing.accept(
                sum(front_end.picture_s + front_end.pixel_s * item.pixels for item in request.items)
            )
        sequence = _Sequence(request=request, text_left=request.text_tokens)
        if sequence.waits:
            self._waiting[request] = sequence
        else:
            self._ready(sequence)

    def _ready(self, sequence: _Sequence) -> None:
        if sequence.started:
            self._queue.appendleft(sequence)
        else:
            self._queue.append(sequence)
        if not self._busy:
            self._begin()
        elif self._only_decode:
            self._cut()

    def _begin(self) -> None:
        """Begin the next step, or all steps up to the next that does more than decode."""
        decoding = len(self._ends)
        self._prefilled = []
        tokens, encode_s = self._take_prompts(decoding)
        self._busy = bool(tokens or decoding)
        if not self._busy:
            return
        prefill, decode = self._times.prefill, self._times.decode
        # The weights are read once, whatever the step computes with them.
        base_s = max(prefill.base_s if tokens else 0.0, decode.base_s if decoding else 0.0)
        compute_s = base_s + prefill.per_token_s * tokens + decode.per_sequence_s * decoding
        self._only_decode = not tokens
        self._planned = 1 if tokens else self._ends[0][0] - self.steps
        self._compute_step_s = compute_s
        self._step_s = compute_s + encode_s
        self._since_s = self._timeline.now
        self.encode_s += encode_s
        begun_s = encode_s + prefill.per_token_s * tokens
        self.pending_encode_s = max(0.0, self.pending_encode_s - begun_s)
        self._until(self._since_s + self._planned * self._step_s)

    def _until(self, when_s: float) -> None:
        self._plan += 1
        self._timeline.at(when_s, self._end, self._plan)

    def _cut(self) -> None:
        """Let the steps that only decode end with the one that is under way."""
        passed = (self._timeline.now - self._since_s) / self._step_s if self._step_s else 0.0
        steps = max(1, math.ceil(passed))
        if steps < self._planned:
            self._planned = steps
            self._until(self._since_s + steps * self._step_s)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self.steps += self._planned
        self.compute_s += self._planned * self._compute_step_s
        while self._ends and self._ends[0][0] <= self.steps:
            self._finish(heapq.heappop(self._ends)[2])
        for request in self._prefilled:
            self._on_first(request)
            if request.output_tokens > 1:
                last = self.steps + request.output_tokens - 1
                self._begun += 1
                heapq.heappush(self._ends, (last, self._begun, request))
            else:
                self._finish(request)
        self._begin()

    def _finish(self, request: SimulatedRequest) -> None:
        self._places += 1
        self._on_last(request)

    def _take_prompts(self, decoding: int) -> tuple[float, float]:
        """Choose the prompt tokens of a step; return how many, and the time of its encodes."""
        limits = self._times.engine
        tokens, encode_s, encoded = 0.0, 0.0, 0
        left = float(limits.max_num_batched_tokens - decoding)
        while self._queue and left > 0:
            sequence = self._queue[0]
            if not sequence.started:
                if not self._places:
                    break
                self._places -= 1
                sequence.started = True
            items = sequence.request.items
            full = False
            while left > 0 and sequence.item < len(items) and not sequence.waits:
                item = items[sequence.item]
                if not item.encoded:
                    full = bool(encoded) and encoded + item.embeddings > limits.max_encoder_tokens
                    if full:
                        break
                    encoded += item.embeddings
                    encode_s += self._times.encode.seconds(item.embeddings)
                    item.encoded = True
                taken = min(left, item.embeddings - sequence.of_item)
                tokens += taken
                left -= taken
                sequence.of_item += taken
                if sequence.of_item >= item.embeddings:
                    sequence.item += 1
                    sequence.of_item = 0.0
            if sequence.item == len(items) and left > 0:
                taken = min(left, sequence.text_left)
                tokens += taken
                left -= taken
                sequence.text_left -= int(taken)
                if not sequence.text_left:
                    self._prefilled.append(self._queue.popleft().request)
                    continue
            if not sequence.waits or full or left <= 0:
                break
            self._waiting[sequence.request] = self._queue.popleft()
        return tokens, encode_s
