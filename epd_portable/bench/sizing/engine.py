"""The simulated engine: steps of prefill, decode and, where it has the pictures, encode.

One class is both kinds of instance. A one-process replica encodes all pictures itself; a
prefill+decode instance waits for those that come from an encoder, and may be told to encode some.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from epd_portable.bench.sizing.requests import PictureItem, SimulatedRequest
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.bench.sizing.timeline import EngineTimeline, FifoServer


@dataclass(kw_only=True, slots=True, eq=False)
class _Sequence:
    """What the engine knows of a request.

    Attributes:
        request: The request.
        item: Index of the picture whose tokens come next.
        of_item: Tokens of that picture that are computed.
        text_left: Text tokens that are not.
        started: It holds one of the engine's places.
        turns: Pictures that are encoded here are missing until they are encoded: beside the steps.
    """

    request: SimulatedRequest
    item: int = 0
    of_item: float = 0.0
    text_left: int
    started: bool = False
    turns: bool = False

    @property
    def missing(self) -> PictureItem | None:
        """The picture without which nothing more can be computed, if no step encodes it."""
        items = self.request.items
        if self.item == len(items) or items[self.item].encoded:
            return None
        return items[self.item] if self.turns or not items[self.item].here else None


class SimulatedEngine:
    """Continuous batching with chunked prefill, as vLLM's scheduler does it.

    Every step takes one token of each sequence that generates, then prompt tokens in the order of
    arrival up to the limit of tokens. Pictures are encoded in the step that computes their first
    token, before it, and everybody waits. Steps in which nothing but decoding happens are counted
    many at a time, so a simulation takes time by the request and not by the token.

    With turns it encodes beside its steps: a step waits for at most one turn of the encoder, which
    has all of the time between steps.

    Attributes:
        encode_s: Time of its steps that went into encoding.
        compute_s: Time of its steps that went into prefill and decode.
        owed_s: Encoding and prefill that it was asked for and has not begun.
        steps: Steps so far.
        longest_stall_s: Longest step while somebody generated.

    Args:
        timeline: The clock.
        times: Of the stages.
        turn_s: Of the encoder beside the steps; ``None`` if steps encode.
        on_first: Called when a request's first token is computed.
        on_last: Called when its last one is.
    """

    def __init__(
        self,
        timeline: EngineTimeline,
        times: StageTimes,
        *,
        turn_s: float | None = None,
        on_first: Callable[[SimulatedRequest], None],
        on_last: Callable[[SimulatedRequest], None],
    ) -> None:
        self._timeline = timeline
        self._times = times
        self._turn_s = turn_s
        self._on_first = on_first
        self._on_last = on_last
        self.front_end = FifoServer(timeline)
        self.preprocessing = FifoServer(timeline)
        self.encode_s = 0.0
        self.compute_s = 0.0
        self.owed_s = 0.0
        self.steps = 0
        self.longest_stall_s = 0.0
        self._queue: deque[_Sequence] = deque()
        self._asleep: dict[SimulatedRequest, _Sequence] = {}
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        """Who generates, by the step of its last token."""
        self._places = times.engine.max_num_seqs
        self._begun = 0
        # The steps under way: `_turn` tells their end from that of steps that were cut short.
        self._turn = 0
        self._busy = False
        self._only_decode = False
        self._since_s = 0.0
        self._step_s = self._compute_step_s = 0.0
        self._planned = 0
        self._prefilled: list[SimulatedRequest] = []
        self._late_s = 0.0
        self._encoding: deque[tuple[PictureItem, SimulatedRequest]] = deque()
        """Beside the steps, one after the other."""
        self._encode_left_s = 0.0
        self._alone_since_s: float | None = None
        """The encoder computes, and no step waits; since then."""
        self._alone = 0

    @property
    def computes_for(self) -> bool:
        """Whether it computes for anybody: a step is under way."""
        return self._busy

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request in, by way of the API server."""
        front_end = self._times.front_end
        tokens = request.text_tokens + sum(item.embeddings for item in request.items)
        self.owed_s += self._times.prefill.per_token_s * tokens + sum(
            self._times.encode.seconds(item.embeddings) for item in request.items if item.here
        )
        then = self._prepare if request.items else self._arrived
        self.front_end.serve(self._beside(front_end.request_s), then, request)

    def landed(self, request: SimulatedRequest) -> None:
        """Go on with a request one of whose pictures has come."""
        sequence = self._asleep.get(request)
        if sequence is not None and sequence.missing is None:
            del self._asleep[request]
            self._ready(sequence)

    def _prepare(self, request: SimulatedRequest) -> None:
        front_end = self._times.front_end
        work_s = sum(
            front_end.picture_s + front_end.pixel_s * item.pixels for item in request.items
        )
        self.preprocessing.serve(self._beside(work_s), self._arrived, request)

    def _beside(self, work_s: float) -> float:
        """Return how long work of the API server takes beside the engine's."""
        if not self._times.front_end.shares_core or not self._busy:
            return work_s
        # Both get half of the core until the work is done.
        self._late_s += work_s
        return 2 * work_s

    def _arrived(self, request: SimulatedRequest) -> None:
        turns = self._turn_s is not None
        sequence = _Sequence(request=request, text_left=request.text_tokens, turns=turns)
        if turns:
            self._encode_beside(request)
        if sequence.missing:
            self._asleep[request] = sequence
        else:
            self._ready(sequence)

    def _place(self, sequence: _Sequence) -> None:
        if sequence.started:
            self._queue.appendleft(sequence)
        else:
            self._queue.append(sequence)

    def _ready(self, sequence: _Sequence) -> None:
        self._place(sequence)
        if not self._busy:
            self._begin()
        elif self._only_decode:
            self._cut()

    def _begin(self) -> None:
        """Begin the next step, or those up to the next that is of another kind."""
        decoding = len(self._ends)
        turn_s = self._take_turn() if decoding or self._queue else 0.0
        self._prefilled = []
        tokens, encode_s = self._take_prompts(decoding)
        if not tokens and not decoding:
            self._busy = False
            self._encode_alone()
            return
        encode_s += turn_s
        self._busy = True
        prefill, decode = self._times.prefill, self._times.decode
        # The weights are read once, whatever the step computes with them.
        base_s = max(prefill.base_s if tokens else 0.0, decode.base_s if decoding else 0.0)
        compute_s = base_s + prefill.per_token_s * tokens + decode.per_sequence_s * decoding
        self._only_decode = not tokens
        self._planned = 1 if tokens or self._encoding else self._ends[0][0] - self.steps
        self._compute_step_s = compute_s
        self._step_s = compute_s + encode_s
        self._since_s = self._timeline.now
        self.encode_s += encode_s
        self.owed_s = max(0.0, self.owed_s - encode_s - prefill.per_token_s * tokens)
        if decoding:
            self.longest_stall_s = max(self.longest_stall_s, self._step_s)
        self._until(self._since_s + self._planned * self._step_s)
        if tokens:
            self.compute_s += compute_s

    def _until(self, when_s: float) -> None:
        self._turn += 1
        self._timeline.at(when_s, self._end, self._turn)

    def _cut(self) -> None:
        """Let the steps that only decode end with the one that is under way."""
        passed = (self._timeline.now - self._since_s) / self._step_s if self._step_s else 0.0
        steps = max(1, math.ceil(passed))
        if steps < self._planned:
            self._planned = steps
            self._until(self._since_s + steps * self._step_s)

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._late_s:
            late_s, self._late_s = self._late_s, 0.0
            self._until(self._timeline.now + late_s)
            return
        self.steps += self._planned
        if self._only_decode:
            self.compute_s += self._planned * self._compute_step_s
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, request = heapq.heappop(self._ends)
            self._places += 1
            self._on_last(request)
        for request in self._prefilled:
            self._on_first(request)
            if request.output_tokens > 1:
                last = self.steps + request.output_tokens - 1
                self._begun += 1
                heapq.heappush(self._ends, (last, self._begun, request))
            else:
                self._places += 1
                self._on_last(request)
        self._begin()

    def _encode_beside(self, request: SimulatedRequest) -> None:
        """Begin to encode a request's pictures beside the steps, behind those that there are."""
        first = not self._encoding
        self._encoding.extend((item, request) for item in request.items if item.here)
        if first and self._encoding:
            self._next_encode()
            if not self._busy:
                self._encode_alone()
            elif self._only_decode:
                self._cut()

    def _next_encode(self) -> None:
        if self._encoding:
            embeddings = self._encoding[0][0].embeddings
            self._encode_left_s = self._times.encode.seconds(embeddings)

    def _encode_alone(self) -> None:
        """Encode until a step begins, or the picture is encoded."""
        if not self._encoding:
            return
        self._alone += 1
        self._alone_since_s = self._timeline.now
        self._timeline.at(
            self._timeline.now + self._encode_left_s, self._encoded_alone, self._alone
        )

    def _encoded_alone(self, alone: int) -> None:
        if alone != self._alone or self._alone_since_s is None:
            return
        self._encoded_for(self._timeline.now - self._alone_since_s)
        self._alone_since_s = None
        request = self._encoded()
        if self._encoding:
            self._encode_alone()
        self.landed(request)

    def _take_turn(self) -> float:
        """Let the encoder have its turn before a step; return how long the step waits."""
        if self._alone_since_s is not None:
            self._encoded_for(self._timeline.now - self._alone_since_s)
            self._alone_since_s = None
        if not self._encoding:
            return 0.0
        assert self._turn_s is not None
        turn_s = min(self._turn_s, self._encode_left_s)
        self._encode_left_s -= turn_s
        if not self._encode_left_s:
            request = self._encoded()
            sequence = self._asleep.get(request)
            if sequence is not None and sequence.missing is None:
                del self._asleep[request]
                self._place(sequence)
        return turn_s

    def _encoded_for(self, seconds: float) -> None:
        self.encode_s += seconds
        self.owed_s = max(0.0, self.owed_s - seconds)
        self._encode_left_s = max(0.0, self._encode_left_s - seconds)

    def _encoded(self) -> SimulatedRequest:
        """Take the encoded picture out, and begin the next one; return whose it is."""
        item, request = self._encoding.popleft()
        item.encoded = True
        self._next_encode()
        return request

    def _take_prompts(self, decoding: int) -> tuple[float, float]:
        """Choose the prompt tokens of a step; return how many, and the time of its encodes."""
        limits = self._times.engine
        tokens, encode_s, encoded = 0.0, 0.0, 0.0
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
            while left > 0 and sequence.item < len(items):
                item = items[sequence.item]
                if not item.encoded:
                    if sequence.turns or not item.here:
                        break
                    if encoded and encoded + item.embeddings > limits.max_encoder_tokens:
                        full = True
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
            if sequence.missing is None or full or left <= 0:
                break
            self._asleep[sequence.request] = self._queue.popleft()
        return tokens, encode_s
