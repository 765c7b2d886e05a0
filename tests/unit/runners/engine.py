"""vLLM's scheduler, as far as items concern it, over a `PrefillSide`: what liveness is shown with.

It makes the calls of ``Scheduler.schedule`` and ``update_from_output`` (0.32) in their order, with
seats, KV memory, prefix-cache hits, preemption and a drafter's lookahead. Tokens are numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.runners.harness import Item, PrefillSide

BUDGET = 64
"""Tokens, and embeddings encoded here, of one step."""


@dataclass
class Running:
    """A request between its arrival and its end."""

    request_id: str
    num_tokens: int
    computed: int = 0
    hit: int = 0
    """Tokens that the prefix cache would give it now."""
    running: bool = False


@dataclass
class Engine:
    """One engine.

    Attributes:
        side: Its items.
        seats: Requests that it computes at once.
        kv_tokens: Tokens that its memory holds.
        answered: Requests that have ended with an answer, in that order.
        steps: So far.
        has_room: Whether its memory takes newcomers.
        stopped_at: The waiting request at which the last step ended, for nothing of it could be
            computed: nobody behind it had a turn.
    """

    side: PrefillSide
    seats: int = 4
    kv_tokens: int = 1000
    lookahead: int = 0
    waiting: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    asleep: dict[str, Running] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    steps: int = 0
    has_room: bool = True
    stopped_at: str = ""

    def add(self, request_id: str, *items: Item, hit: int = 0, lead: int = 1) -> None:
        self.side.arrive(request_id, *items, lead=lead)
        places = self.side.items[request_id]
        num_tokens = 1 + (places[-1].end if places else lead)
        self.waiting.append(Running(request_id, num_tokens, hit=hit))

    @property
    def unfinished(self) -> list[Running]:
        return self.running + self.waiting + list(self.asleep.values())

    def abort(self, request_id: str) -> None:
        for queue in (self.waiting, self.running):
            queue[:] = [each for each in queue if each.request_id != request_id]
        self.asleep.pop(request_id, None)
        self._end(request_id)

    def preempt(self) -> None:
        """Take back the seat of the request that was seated last."""
        if self.running:
            self._preempt(self.running[-1])

    def step(self) -> dict[str, int]:
        """Run one step; return the tokens that it computed, by request."""
        self.steps += 1
        self.stopped_at = ""
        receiver, prefill, cache = self.side.receiver, self.side.prefill, self.side.cache
        receiver.take_in()
        receiver.before_step()
        for request_id in reversed(prefill.take_woken()):
            if request_id in self.asleep:  # or it was woken in the step in which it was asked
                self.waiting[:0] = [self.asleep.pop(request_id)]
        scheduled: dict[str, int] = {}
        budget, embeds = BUDGET, BUDGET
        for request in list(self.running):
            if request not in self.running:
                continue
            if not prefill.may_schedule(request.request_id, request.computed, running=True):
                continue
            count, embeds = self._schedule(request, request.computed, budget, embeds)
            if count:
                while not self._has_memory(request, count) and self.running[-1] is not request:
                    scheduled.pop(self.running[-1].request_id, None)
                    self._preempt(self.running[-1])
                if not self._has_memory(request, count):
                    self._preempt(request)
                    break
                scheduled[request.request_id] = count
                budget -= count
        for request in list(self.waiting):
            if len(self.running) >= self.seats or not budget:
                break
            hit = min(request.hit, request.num_tokens - 1)
            if not prefill.may_schedule(request.request_id, hit, running=False):
                continue
            count, embeds = self._schedule(request, hit, budget, embeds)
            if not count:
                self.stopped_at = request.request_id
                break
            if not (self.has_room and self._has_memory(request, hit + count)):
                cache.free(self.side.requests[request.request_id])
                break
            request.computed = hit
            request.running = True
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = count
            budget -= count
        for request_id in prefill.take_sleepers():
            (sleeper,) = (each for each in self.waiting if each.request_id == request_id)
            self.waiting.remove(sleeper)
            self.asleep[request_id] = sleeper
        freed = cache.get_freed_mm_hashes()
        orders = receiver.orders.take_orders(freed, computes=bool(scheduled))
        self.side.placements += orders.placements
        for request_id in prefill.take_unavailable():
            if request_id in scheduled:
                raise AssertionError(f"{request_id} was computed and failed")
            self.refused.append(request_id)
            self.abort(request_id)
        for request in list(self.running):
            request.computed += scheduled.get(request.request_id, 0)
            engine_request = self.side.requests[request.request_id]
            for input_id in list(cache.get_cached_input_ids(engine_request)):
                end = self.side.items[request.request_id][input_id].end
                if end + self.lookahead <= request.computed:
                    cache.free_encoder_input(engine_request, input_id)
            if request.computed >= request.num_tokens:
                self.running.remove(request)
                self.answered.append(request.request_id)
                self._end(request.request_id, request.computed)
        receiver.step_done()
        return scheduled

    def _schedule(
        self, request: Running, computed: int, budget: int, embeds: int
    ) -> tuple[int, int]:
        """Return how many tokens can be computed, and encode what these need."""
        cache = self.side.cache
        engine_request = self.side.requests[request.request_id]
        count = min(request.num_tokens - computed, budget)
        encode: list[int] = []
        names: set[str] = set()
        for place in self.side.items[request.request_id]:
            if place.end <= computed:
                continue
            if place.begin >= computed + count + self.lookahead:
                break
            if place.mm_hash in names:
                continue
            if cache.check_and_update_cache(engine_request, place.input_id):
                continue
            wanted = sum(self.side.items[request.request_id][i].num_embeds for i in encode)
            if not cache.can_allocate(engine_request, place.input_id, embeds, wanted):
                count = max(0, place.begin - (computed + self.lookahead))
                break
            names.add(place.mm_hash)
            encode.append(place.input_id)
            embeds -= place.num_embeds
        if not count:
            return 0, embeds
        for input_id in encode:
            cache.allocate(engine_request, input_id)
            mm_hash = self.side.items[request.request_id][input_id].mm_hash
            self.side.prefill.encoded_here(request.request_id, mm_hash)
        return count, embeds

    def _has_memory(self, request: Running, count: int) -> bool:
        used = sum(each.computed for each in self.running if each is not request)
        return used + request.computed + count <= self.kv_tokens

    def _preempt(self, request: Running) -> None:
        self.running.remove(request)
        self.side.cache.free(self.side.requests[request.request_id])
        request.computed, request.running = 0, False
        self.waiting.insert(0, request)

    def _end(self, request_id: str, computed: int = 0) -> None:
        self.side.computed[request_id] = computed
        self.side.finish(request_id)
