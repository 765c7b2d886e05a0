"""A run: requests come and go, peers fail or do not, and then everything must have ended well."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random

from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import Foreign, Grant
from tests.kit.encoder import Encoder
from tests.kit.engine import Engine, Running, embed_bytes
from tests.kit.memory import PoolMemory, Violation, Worker
from tests.kit.sizes import PLACEHOLDER, Prompt, Wish
from tests.kit.store import Shelf
from tests.property.engine_model import shapes
from tests.property.engine_model.peers import Front, Job, Network
from tests.unit.builders import Clock

TURN_S = 0.05
JUMP_S = 1.0
"""Seconds of a turn without an event, where deadlines may be needed."""
QUIET_TURNS = 80
"""So long nothing may happen while somebody waits who could go on: unanswered messages are sent
again every second, that is every twenty turns."""
QUIET_S = 140.0
"""The same where peers may fail: longer than every deadline."""
SETTLED_S = 130.0
"""After which a process that is gone has written what it ever will."""
MOST_TURNS = 30_000
MOST_PAUSED_TURNS = 3_000
TRACE = 400


class World:
    """An instance, its peers, and its requests."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.rng = rng = Random(seed)
        self.shape = shape = shapes.draw(rng)
        self.clock = Clock()
        self.trace: deque[str] = deque(maxlen=TRACE)
        self._traced = traced
        self.pool = PoolMemory()
        fails = shape.faults or shape.flaws
        self.worker = Worker(rng, self.pool, copies=shape.copies, fails=fails)
        self.worker.ranks = 1 if shape.beside else 2
        self.store = Shelf(self.clock, self.pool, rng, fails=0.15 if fails else 0.0)
        self.store.entries = {name for name in shape.items if rng.random() < 0.8}
        self.store.seen = self.worker.seen
        self.engine = Engine(shape, rng, self.clock, self.worker, self.note, self.store)
        self.network = Network(rng, shape)
        self.encoders = [
            Encoder(
                f"encode-{number}",
                rng,
                shape,
                self.clock,
                self.pool,
                self.engine.post.fence,
                self.worker.revoked,
                fingerprint="other" if fails and rng.random() < 0.1 else "same",
                is_perfect=not fails,
                seen=self.worker.seen,
            )
            for number in range(len(shape.paths))
        ]
        self.engine.post.paths = {
            encoder.name: path
            for encoder, path in zip(self.encoders, shape.paths, strict=True)
            if not (fails and rng.random() < 0.05)
        }
        for encoder in self.encoders if shape.flaws else ():
            encoder.is_foreign = rng.random() < 0.1
        self.front = Front(rng, self.encoders, self.later, self._give_up)
        self.prompts = shapes.Prompts(rng, shape, shapes.longest_prompt(shape))
        self._todo: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._pauses = rng.random() < 0.2
        self._pause = ""
        self._sleeps = False
        self._paused_turn = 0
        self._saw_reset: set[str] = set()
        """Requests that had something when a cache was reset: they need it again."""
        self._on_demand: set[str] = set()
        """Transfers whose jobs wait until the instance asks."""
        self._stored: set[str] = set()
        """Transfers that the store is to bring: their jobs wait until it has not."""
        self._count = 0
        self._coming: set[str] = set()
        self._judged: set[str] = set()
        self._sent_again: set[str] = set()
        """Requests that were sent before, by another name."""
        self._is_over = False
        self._quiet_turns, self._quiet_since, self._state = 0, self.clock.now, ()
        self._decoded = 0
        self.seen = self.worker.seen

    def note(self, *what: object) -> None:
        if self._traced:
            self.trace.append(
                f"{self.network.turn:5d} {self.clock.now - 1000:8.2f}s  " + " ".join(map(str, what))
            )

    def later(self, turns: int, action: Callable[[], None]) -> None:
        """Do something in so many turns."""
        heapq.heappush(self._todo, (self.network.turn + turns, next(self._numbers), action))

    # -- what happens ------------------------------------------------------------------------------

    def run(self) -> None:
        """Let everything happen, then let everything end.

        Raises:
            Violation: Something does not hold.
        """
        rng, shape = self.rng, self.shape
        self.note(shape)
        turns = rng.choice([20, 60, 150])
        for _ in range(shape.requests):
            self.later(rng.randint(6, turns), self.arrive)
        for number in range(rng.choice([0, 0, 3, 12])):
            self.later(rng.randint(6, turns), lambda job=f"J{number}": self._ask_to_encode(job))
        invalidates = rng.random() < 0.25
        resets = rng.random() < 0.25
        for _ in range(turns + 10):
            if resets:
                self._reset()
            if self._pauses and not self._pause and rng.random() < 0.03:
                self._begin_pause()
            if shape.faults:
                self._fail()
            self.turn(may_invalidate=invalidates and rng.random() < 0.05)
        while self.engine.unfinished or self.engine.jobs or self.worker.is_sending or self._pause:
            self.turn()
            if self.network.turn > MOST_TURNS:
                raise Violation(f"{self._those_waiting()} go on for ever")
        self._end_well()
        self.seen["steps"] = self.engine.steps

    def close(self) -> None:
        self.engine.close()

    def arrive(self, prompt: Prompt | None = None, encoder: Encoder | None = None) -> str:
        """A request comes; jobs for its items are begun about then."""
        rng, shape = self.rng, self.shape
        self._count += 1
        request_id = self._new_name() if prompt else self._name()
        prompt = prompt or self.prompts.next()
        transfers = {}
        sizes = {name: size for name, _, size in prompt.places}
        for name, wish in prompt.wishes.items():
            if not wish.moved:
                continue
            transfer_id = transfers[name] = f"{request_id}-{name}-{self._count}"
            tensor = TensorSpec(shape=(sizes[name], embed_bytes() // 4), dtype="float32")
            job = Job(transfer_id, request_id, name, tensor)
            self.front.jobs[transfer_id] = job
            if encoder is not None:
                job.asked = [each.name for each in self.encoders if each is not encoder]
            elif wish.stored:
                self._stored.add(transfer_id)
                continue
            elif rng.random() < 0.3:
                # Held or not: the instance asks if it is not.
                self._on_demand.add(transfer_id)
                continue
            elif shape.faults and not self._is_over and rng.random() < 0.1:
                continue  # The job is lost, and nobody says so.
            self.later(rng.choice([0, 0, 1, 5, 15]), lambda job=job: self.front.ask(job))
        self.later(rng.choice([0, 0, 2, 8]), lambda: self._add(request_id, prompt, transfers))
        self._coming.add(request_id)
        return request_id

    def _name(self) -> str:
        """Return the id of a new request; some clients use one again when its request has ended.

        And when the front has noted that end, which ends the jobs of all requests of that id.
        """
        if self.rng.random() >= 0.05:
            return self._new_name()
        ended = sorted(
            (self.engine.ended.keys() & self._judged) - self._coming - self.engine.under_way
        )
        return self.rng.choice(ended) if ended else self._new_name()

    def _new_name(self) -> str:
        return f"R{self._count}"

    def _add(self, request_id: str, prompt: Prompt, transfers: dict[str, str]) -> None:
        self._coming.remove(request_id)
        if self.engine.ended.pop(request_id, None) is not None:
            self.seen["request ids used again"] += 1
            self._judged.discard(request_id)
        self.note(
            "arrives",
            request_id,
            prompt.places,
            len(prompt.tokens),
            "+",
            prompt.answer,
            prompt.wishes,
        )
        parts = {*self.shape.parts}
        self.seen["videos in parts"] += bool(parts) and parts <= prompt.wishes.keys()
        on_demand = self._on_demand & {*transfers.values()}
        stored = self._stored & {*transfers.values()}
        self.engine.add(request_id, prompt, transfers, on_demand, stored)
        self.seen["items on demand"] += len(on_demand)
        self.seen["items looked for in the store"] += len(stored)
        if not self._is_over and self.rng.random() < 0.08:
            self.later(self.rng.choice([0, 1, 3, 10, 40]), lambda: self._cancel(request_id))

    def _ask_to_encode(self, job: str) -> None:
        name, size = self.rng.choice(sorted(self.shape.items.items()))
        self.note("job", job, name)
        self.engine.add_job(job, name, size)
        if self.rng.random() < 0.1:
            self.later(self.rng.choice([0, 1, 3, 10]), lambda: self.engine.abort_job(job))

    def _cancel(self, request_id: str) -> None:
        if request_id in self.engine.unfinished:
            self.note("cancelled", request_id)
            self.engine.abort(request_id)

    def _give_up(self, job: Job) -> None:
        """No encoder is left for an item: its request is sent again, unless it has begun."""
        if job.request_id in self._coming:
            self.later(1, lambda: self._give_up(job))
            return
        running = self.engine.unfinished.get(job.request_id)
        if running is None or running.request.num_output_tokens:
            return
        self.note("sent again without", job.transfer_id)
        self.engine.abort(job.request_id)
        self._send_again(running, {job.name})

    def _send_again(self, running: Running, here: set[str]) -> None:
        """Send a request once more, with media of items that no encoder is to bring."""
        if self._is_over or running.request_id in self._sent_again:
            return
        self.seen["requests sent again"] += 1
        wishes = running.prompt.wishes
        if self.shape.can_encode:
            wishes = wishes | {name: Wish(moved=False, media=True) for name in here}
        self._sent_again.add(self.arrive(replace(running.prompt, wishes=wishes)))

    def _reset(self) -> None:
        if self.rng.random() < (0.1 if self.engine.is_encoding else 0.01):
            self.seen["resets of the encoder cache"] += 1
            self._reset_encoder_caches()
        if self.rng.random() < 0.01:
            running = self.rng.random() < 0.5
            self.seen["resets of the prefix cache"] += 1
            self.note("the prefix cache is reset, running:", running)
            self._saw_reset |= set(self.engine.unfinished)
            self.engine.reset_prefix_cache(running=running)

    def _reset_encoder_caches(self) -> None:
        """Let all engines forget what they encoded, encoders first, as a front does."""
        # Also requests whose items came before them.
        self._saw_reset |= {job.request_id for job in self.front.jobs.values()}
        self._saw_reset |= set(self.engine.unfinished)
        new = not any(each.is_stopped for each in self.encoders)  # It would wait for these.
        self.note("encoder caches are reset", "for new weights" if new else "")
        if new:
            self.seen["new weights"] += 1
            for encoder in self.encoders:
                encoder.reset()
            for job in self.front.jobs.values():
                job.asked.clear()
        self.engine.reset_encoder_cache()
        if new:  # Its entries are of the new weights too.
            self.pool.weights += 1
            self.store.entries = {each for each in self.shape.items if self.rng.random() < 0.4}

    def _begin_pause(self) -> None:
        self._pause = self.rng.choice(["abort", "wait", "keep"])
        self._paused_turn = self.network.turn
        self.seen[f"pauses: {self._pause}"] += 1
        self.note("pause", self._pause)
        self.engine.pause(self._pause)
        self._sleeps = self._pause == "wait" or self.rng.random() < 0.5
        if not self._sleeps:
            self.later(self.rng.choice([1, 5, 40]), self._resume)

    def _resume(self) -> None:
        self.note("resume")
        self._pause = ""
        self.engine.resume()

    def _go_on_pausing(self) -> None:
        """Let an engine that is to sleep empty its caches when it is idle; let time pass."""
        turns = self.network.turn - self._paused_turn
        if self._sleeps and self._pause != "asleep" and self.engine.is_paused():
            self.seen[f"sleeps: {self._pause}"] += 1
            self.note("sleeps")
            self._pause = "asleep"
            self.engine.reset_prefix_cache(running=True)
            self._reset_encoder_caches()
            self.later(self.rng.choice([1, 5, 40]), self._resume)
        elif self._pause == "wait" and turns > MOST_PAUSED_TURNS:
            raise Violation(f"a pause waits for ever: {self._those_waiting()}")
        elif self._pause == "wait" and self.shape.faults and turns > QUIET_TURNS:
            self.clock.now += JUMP_S

    def _fail(self) -> None:
        rng = self.rng
        encoder = rng.choice(self.encoders)
        if rng.random() < 0.02:
            encoder.is_stopped = not encoder.is_stopped
            self.seen["encoders stopped or let go on"] += 1
            self.note(encoder.name, "stops" if encoder.is_stopped else "goes on")
        if rng.random() < 0.01:
            self._kill(encoder)
        if self.shape.store and rng.random() < 0.02:
            self.store.is_blocked = not self.store.is_blocked
            self.seen["stores that hang or go on"] += 1
        if rng.random() < 0.05:
            self.network.repeat()
        if rng.random() < 0.01:
            self.clock.now += rng.choice([1.0, 5.0, 12.0, 31.0])
            self.seen["times that passed"] += 1
            self.note("time passes")
        if rng.random() < 0.01:
            self._jump(encoder, rng.choice([1.0, 5.0, 12.0, 31.0, 3600.0]))

    def _jump(self, encoder: Encoder, seconds: float) -> None:
        """The clock of one process jumps, or the process was not run for so long."""
        if self.rng.random() < 0.5:
            self.seen["clocks of encoders that jumped"] += 1
            self.note("the clock jumps of", encoder.name)
            encoder.clock.ahead_s += seconds
        else:
            self.seen["clocks of the instance that jumped"] += 1
            self.note("the clock jumps of the instance")
            self.clock.now += seconds
            for each in self.encoders:
                each.clock.ahead_s -= seconds

    def _kill(self, encoder: Encoder) -> None:
        self.seen["encoders killed"] += 1
        self.note(encoder.name, "is killed and started again")
        if self.shape.known_gone:
            self.engine.post.gone.add(encoder.session_id)
        encoder.start()
        self.front.encoder_died(encoder.name)

    # -- turns -------------------------------------------------------------------------------------

    def turn(self, *, may_invalidate: bool = False) -> None:
        """Let everybody go on for a turn."""
        self.network.turn += 1
        self.clock.now += TURN_S
        while self._todo and self._todo[0][0] <= self.network.turn:
            heapq.heappop(self._todo)[-1]()
        self.go_on()
        if not self.engine.is_paused() if self._pause else self.engine.has_work:
            self.engine.turn(self.go_on, may_invalidate=may_invalidate)
            self.carry()
        requested, self.engine.requested = self.engine.requested, []
        for transfer_id in requested:
            self.seen["items asked for"] += 1
            self.note("asks for", transfer_id)
            job = self.front.jobs.get(transfer_id)
            if job:
                self.later(self.rng.choice([0, 0, 1, 5]), lambda job=job: self.front.ask(job))
        for request_id in [each for each in self.engine.ended if each not in self._judged]:
            self._judge(self.engine.ended[request_id])
        if self._pause:
            self._go_on_pausing()
            self._quiet_turns, self._quiet_since = 0, self.clock.now
            return
        self._watch()
        if self.store.idle_slots:
            raise Violation("the store holds slots that no thread fills")
        looks = (self.engine.unfinished or self.engine.jobs) and self.network.turn % 16 == 0
        if looks and not self.engine.scheduler.has_requests():
            raise Violation("the engine takes itself for idle")

    def go_on(self) -> None:
        """Let everybody but the engine go on; it is in the middle of a turn, maybe."""
        self.carry()
        self.store.turn()
        for encoder in self.encoders:
            for message in encoder.turn():
                self.network.send(encoder.identity, message, to_instance=True)
        self.carry()

    def carry(self) -> None:
        """Bring messages that have arrived, and take in what the instance sends."""
        post = self.engine.post
        for parcel in self.network.arrived():
            if parcel.to_instance:
                self.note("to instance", parcel.identity.decode(), _short(parcel.message))
                post.inbox.append((parcel.identity, parcel.message))
                if isinstance(parcel.message, Foreign) and parcel.message.awaits_reply:
                    # As the control channel does.
                    refusal = parcel.message.refusal()
                    self.network.send(parcel.identity, refusal, to_instance=False)
            else:
                for encoder in self.encoders:
                    if encoder.identity == parcel.identity:
                        self.note("to", encoder.session_id, _short(parcel.message))
                        encoder.inbox.append(parcel.message)
        self.engine.take_in()
        sent, post.outbox = post.outbox, []
        for identity, message in sent:
            if isinstance(message, Grant):
                self.pool.granted(message.slot)
            self.network.send(identity, message, to_instance=False)

    # -- what must hold ----------------------------------------------------------------------------

    def _judge(self, running: Running) -> None:
        request_id = running.request_id
        self._judged.add(request_id)
        self.seen[f"requests that ended: {running.ended}"] += 1
        self.front.request_ended(request_id, well=running.ended not in ("abort", "error"))
        if running.ended == "error" and not running.request.num_output_tokens:
            self._send_again(running, {*running.prompt.wishes})
        if shapes.TOO_LARGE in running.prompt.wishes and running.ended != "abort":
            self.seen["items that are too large"] += 1
            wish = running.prompt.wishes[shapes.TOO_LARGE]
            size = self.shape.items[shapes.TOO_LARGE]
            if running.ended != "error" and (wish.moved or size > self.shape.cache):
                raise Violation(f"{request_id} was answered, and its item is too large")
            return
        if running.ended != "error":
            return
        bare = running.prompt.bare(self.shape.can_encode)
        excused = (
            self.shape.faults
            or self.shape.flaws
            or bool(self.store.errors)
            or request_id in self._saw_reset
            # Who computes again needs items again, and may have to take those of others.
            or bool(self.engine.recomputed)
            or self._is_over  # Whoever asks then looks at what comes of it.
            or self._cannot_keep(running.prompt, bare)
        )
        if not bare or not excused:
            raise Violation(
                f"{request_id} was refused, and nothing had failed; bare: {sorted(bare)}"
            )

    def _cannot_keep(self, prompt: Prompt, bare: set[str]) -> bool:
        """Tell whether a request may have to give up a bare item for another one of its own.

        Between two of the item's places, or because the prefix cache covered the other one, and
        then did not. A slot that is kept may leave the pool in two pieces.
        """
        shape = self.shape

        def fit(names: set[str]) -> bool:
            sizes = [shape.items[name] for name in names]
            return sum(sizes) <= shape.cache and (
                shape.copies or sum(sizes) + max(sizes) <= shape.pool
            )

        names = [name for name, _, _ in prompt.places]
        if shape.prefix_caching and len(set(names)) > 1 and not fit(set(names)):
            return True
        return any(
            not fit(set(names[names.index(name) : len(names) - names[::-1].index(name)]))
            for name in bare
            if names.count(name) > 1
        )

    def _watch(self) -> None:
        """See that somebody goes on as long as somebody waits who could."""
        engine = self.engine
        state = (
            engine.prompt_tokens,
            len(engine.ended),
            len(engine.jobs),
            self._count,
            len(self._coming),
            sum(encoder.writes_ended for encoder in self.encoders),
            self.front.asked,
            self.store.reads,
            len(engine.recomputed),
        )
        if (
            state != self._state
            or self.worker.is_encoding
            or not (engine.unfinished or engine.jobs)
        ):
            self._state = state
            self._quiet_turns, self._quiet_since = 0, self.clock.now
            self._decoded = engine.tokens
            return
        self._quiet_turns += 1
        if self.shape.faults and self._quiet_turns > (60 if self._is_over else 10):
            self.clock.now += JUMP_S
        if self._quiet_turns < QUIET_TURNS:
            return
        if self.shape.faults and self.clock.now - self._quiet_since < QUIET_S:
            return
        waiting = [
            each
            for each in engine.unfinished.values()
            if each.request.num_computed_tokens < len(each.prompt.tokens)
        ]
        is_idle = engine.tokens == self._decoded
        stuck = [
            each
            for each in waiting
            if each.request in engine.scheduler.running and engine.could_start(each)
        ]
        self.engine.check_stalls()
        if is_idle:
            jobs = sorted(engine.jobs)
            raise Violation(f"{self._those_waiting()}, jobs {jobs}, wait for ever")
        if stuck or (waiting and all(engine.could_start(each) for each in waiting)):
            names = [each.request_id for each in stuck or waiting]
            raise Violation(f"{names} wait for others' answers, and could go on")

    def _those_waiting(self) -> str:
        """Return the requests that have not ended: how far they are, and where their items are."""
        found = []
        for each in sorted(self.engine.unfinished.values(), key=lambda each: each.request_id):
            request, prompt = each.request, each.prompt
            text = f"{each.request_id} at {request.num_computed_tokens}"
            if request in self.engine.scheduler.running:
                text += " (runs)"
            elif hit := self.engine.hit(each):
                text += f" (finds {hit})"
            text += f" of {len(prompt.tokens)}+{prompt.answer} "
            places = [f"{name}@{offset}-{offset + size}" for name, offset, size in prompt.places]
            found.append(text + " ".join(places))
        return "; ".join(found)

    def _end_well(self) -> None:
        """All room and all slots can be had again."""
        self.note("all requests have ended")
        self.network.recover()
        self.store.is_blocked, self.store.fails = False, 0.0
        self._is_over = True
        for encoder in self.encoders:
            encoder.is_perfect = True
            if encoder.is_foreign or (encoder.is_stopped and self.rng.random() < 0.5):
                self._kill(encoder)
            encoder.is_stopped = False
        self._let_time_pass(2 * self.shape.wait_timeout_s)
        fit = [
            each
            for each in self.encoders
            if each.fingerprint == "same" and each.name in self.engine.post.paths
        ]
        for request_id in [self._probe(encoder, 1) for encoder in fit]:
            # It is heard, so that former lives of its encoder are known to be over; it may not
            # come because slots of these are not free yet.
            self._finish(request_id)
        self._let_time_pass(SETTLED_S)
        for encoder in (*fit, *fit[:1]):
            request_id = self._probe(encoder, min(self.shape.cache, self.shape.pool))
            if self._finish(request_id) != "length":
                raise Violation(f"the item of {request_id} did not come after all had ended")
        self._reset_encoder_caches()
        for _ in range(3):
            self._finish(
                self.arrive(Prompt(tokens=[1], places=[], wishes={}, answer=4, priority=0))
            )
        self.engine.check_room()
        self.engine.check_slots()
        self.engine.check_stalls()
        if self.store.waiting:
            raise Violation(f"{self.store.waiting} loads of the store have not ended")

    def _let_time_pass(self, seconds: float) -> None:
        for _ in range(40):
            self.clock.now += seconds / 40
            self.turn()

    def _probe(self, encoder: Encoder, size: int) -> str:
        """Ask for an item that must come from an encoder."""
        size = min(size, self.shape.blocks * self.shape.block // 2)
        if self.shape.whole_items:
            size = min(size, self.shape.tokens - 2 * self.shape.lookahead)
        name = f"probe-{next(self._numbers)}"
        prompt = Prompt(
            tokens=[1] + [PLACEHOLDER] * size + [1],
            places=[(name, 1, size)],
            wishes={name: Wish(moved=True, media=False)},
            answer=1,
            priority=0,
        )
        return self.arrive(prompt, encoder)

    def _finish(self, request_id: str) -> str:
        for _ in range(20 * QUIET_TURNS):
            if request_id in self.engine.ended:
                return self.engine.ended[request_id].ended
            self.turn()
        raise Violation(f"{request_id}, which came when all had ended, does not end")


def _short(message: object) -> str:
    text = type(message).__name__ + " " + str(getattr(message, "transfer_id", ""))
    for name in ("attempt", "code", "reason", "slot"):
        value = getattr(message, name, None)
        if name == "slot" and value is not None:
            text += f" [{value.offset}+{value.nbytes}] {value.generation & 0xFFFF}"
        elif value:
            text += f" {value & 0xFFFF if isinstance(value, int) else value}"
    return text
