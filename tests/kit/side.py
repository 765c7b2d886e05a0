"""A prefill+decode side whose test decides what happens, and when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Any, NamedTuple

from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import Grant
from tests.kit.encoder import Encoder
from tests.kit.engine import Engine, embed_bytes
from tests.kit.memory import PoolMemory, Worker
from tests.kit.sizes import PLACEHOLDER, Prompt, Sizes, Wish
from tests.kit.store import Shelf
from tests.unit.builders import Clock

TURN_S = 0.05


class Part(NamedTuple):
    """An item of a prompt; ``media`` is whether the request holds its media."""

    name: str
    media: bool


def media(name: str) -> Part:
    """Return an item whose media the request holds."""
    return Part(name, True)


def bare(name: str) -> Part:
    """Return an item that the request has as metadata only."""
    return Part(name, False)


class Side:
    """An instance, the encoders that a test gives it, and the messages between them.

    Messages arrive at once. Take `Sizes` as keyword arguments; ``pool`` is ``cache`` by default.

    Attributes:
        engine: vLLM's scheduler with our connector.
        store: Of encoder outputs; empty at first.
        worker: Fake memory of the workers; fails the test when a step computes with wrong bytes.
        ended: How requests ended (vLLM's finish reason, ``abort``), by id.
    """

    def __init__(self, *, items: dict[str, int], cache: int, pool: int = 0, **sizes: Any) -> None:
        self.sizes = Sizes(items=items, cache=cache, pool=pool or cache, **sizes)
        self.clock = Clock()
        self._rng = Random(0)
        self._pool = PoolMemory()
        self.worker = Worker(self._rng, self._pool, copies=self.sizes.copies, fails=False)
        self.store = Shelf(self.clock, self._pool, self._rng)
        self.engine = Engine(
            self.sizes, self._rng, self.clock, self.worker, lambda *what: None, self.store
        )
        self.encoders: list[Encoder] = []

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.scheduler

    @property
    def ended(self) -> dict[str, str]:
        return {name: running.ended for name, running in self.engine.ended.items()}

    def computed(self, request_id: str) -> int:
        """Return how many tokens of a request are computed."""
        return int(self.scheduler.requests[request_id].num_computed_tokens)

    @property
    def transfers_waiting(self) -> int:
        """Transfers that are announced and have no slot, as metrics show them."""
        return int(self.engine.metric("epd_pd_transfers_waiting"))

    @property
    def pool_used(self) -> float:
        """Fraction of the receive pool that is in slots, as metrics show it."""
        used = self.engine.metric("epd_pd_pool_used_bytes")
        return used / self.engine.metric("epd_pd_pool_bytes")

    # -- what happens ------------------------------------------------------------------------------

    def encoder(self, name: str = "encode-0", path: str = "shm") -> Encoder:
        """Start an encode instance, and let it reach the pool by a path; there may be none."""
        found = Encoder(
            name,
            self._rng,
            self.sizes,
            self.clock,
            self._pool,
            self.engine.post.fence,
            self.worker.revoked,
        )
        self.encoders.append(found)
        if path:
            self.engine.post.paths[name] = path
        return found

    def encode(self, encoder: Encoder, transfer_id: str, name: str) -> None:
        """Have an encoder encode an item for a transfer to this side."""
        shape = (self.sizes.items[name], embed_bytes() // 4)
        encoder.submit(transfer_id, name, TensorSpec(shape=shape, dtype="float32"))

    def ask(
        self,
        request_id: str,
        *parts: Part | int,
        answer: int = 1,
        transfers: Mapping[str, str] | None = None,
        on_demand: Collection[str] = (),
        stored: Collection[str] = (),
    ) -> None:
        """Add a request.

        Args:
            parts: Of its prompt: items, and numbers of text tokens, which are all alike.
            transfers: Its transfers, by item.
            on_demand: Transfers that the side requests when it needs them.
            stored: Transfers that the store is to bring.
        """
        tokens: list[int] = []
        places, wishes, transfers = [], {}, transfers or {}
        for part in parts:
            if isinstance(part, int):
                tokens += [1] * part
                continue
            size = self.sizes.items[part.name]
            places.append((part.name, len(tokens), size))
            wishes[part.name] = Wish(moved=part.name in transfers, media=part.media)
            tokens += [PLACEHOLDER] * size
        prompt = Prompt(tokens=tokens, places=places, wishes=wishes, answer=answer)
        self.engine.add(request_id, prompt, dict(transfers), on_demand, stored)

    def leave(self, request_id: str) -> None:
        """The client of a request leaves; nothing else is sent."""
        self.engine.abort(request_id)

    def update_weights(self) -> None:
        """Give all engines other weights and an empty store, and reset them, encoders first."""
        for encoder in self.encoders:
            encoder.reset()
        self.engine.reset_encoder_cache()
        self.store.entries.clear()
        self._pool.weights += 1

    def roll_back(self, request_id: str) -> None:
        """Let the KV of a running request turn out not to be loaded, in a step of its own."""
        self.engine.invalidate(request_id)
        self.turns()

    def turns(self, count: int = 1, *, seconds: float = TURN_S) -> None:
        """Let time pass, messages arrive and the engine take a step, so often."""
        for _ in range(count):
            self.clock.now += seconds
            self._go_on()
            if self.engine.has_work:
                self.engine.turn(self._go_on, may_invalidate=False)
                self._carry()

    def until(self, done: Callable[[], bool], *, within_s: float, seconds: float = TURN_S) -> float:
        """Take turns until something holds; return the seconds that it took by the clock.

        Raises:
            AssertionError: It does not hold within that time.
        """
        begin_s = self.clock.now
        while not done():
            waits = sorted(self.engine.unfinished)
            assert self.clock.now - begin_s < within_s, f"after {within_s} s {waits} wait"
            self.turns(seconds=seconds)
        return self.clock.now - begin_s

    def until_ended(self, *request_ids: str, within_s: float, seconds: float = TURN_S) -> float:
        """Take turns until requests have ended; see `until`."""
        return self.until(
            lambda: self.engine.ended.keys() >= set(request_ids), within_s=within_s, seconds=seconds
        )

    def close(self) -> None:
        """Check that all memory can be had again and nothing stalled, and end the scheduler."""
        self.engine.check_stalls()
        self.engine.reset_encoder_cache()
        for number in range(3):
            self.ask(f"last-{number}", 1)
            self.until_ended(f"last-{number}", within_s=10.0)
        self.engine.check_room()
        self.engine.check_slots()
        self.engine.close()

    # ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        self._carry()
        self.store.turn()
        for encoder in self.encoders:
            self.engine.post.inbox += [(encoder.identity, each) for each in encoder.turn()]
        self._carry()

    def _carry(self) -> None:
        """Bring messages to the instance, and its own to encoders."""
        self.engine.take_in()
        sent, self.engine.post.outbox = self.engine.post.outbox, []
        for identity, message in sent:
            if isinstance(message, Grant):
                self._pool.granted(message.slot)
            for encoder in self.encoders:
                if encoder.identity == identity:
                    encoder.inbox.append(message)
