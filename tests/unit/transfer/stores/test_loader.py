from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from epd_portable.errors import StoreError
from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.stores.loader import IDENTITY, StoreLoader
from epd_portable.transfer.stores.metrics import StoreMetrics
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Grant,
    Later,
    Nack,
    NackCode,
    NotNeeded,
    Written,
)
from tests.unit.builders import Clock, peer, slot
from tests.unit.transfer.stores.memory import (
    DEADLINE_S,
    NAMESPACE,
    SEAL,
    SPEC,
    MemoryStore,
    entry,
    key,
)
from tests.waiting import until

TIMEOUT_S = 1.0


class Slots:
    def __init__(self) -> None:
        self.data = bytearray(4 * SPEC.nbytes)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.data)[offset : offset + nbytes]


class Side:
    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.clock = Clock()
        self.slots = Slots()
        self.news = threading.Semaphore(0)
        self.registry = CollectorRegistry()
        self.breaker = CircuitBreaker(first_s=1.0, clock=self.clock, chance=lambda: 0.5)
        self.loader = StoreLoader(
            store,
            SEAL,
            peer("prefill_decode-0"),
            NAMESPACE,
            self.slots,
            timeout_s=TIMEOUT_S,
            wake=self.news.release,
            breaker=self.breaker,
            metrics=StoreMetrics("pd", self.registry),
            clock=self.clock,
        )

    def announce(self, name: str, *, tensor: TensorSpec = SPEC, at: str = "") -> Announce:
        message = self.loader.load(f"t-{name}", at or key(name), name, tensor)
        assert isinstance(message, Announce)
        return message

    def grant(self, announced: Announce, *, generation: int = 1, offset: int = 0) -> None:
        granted = slot(generation, offset=offset, nbytes=announced.tensor.nbytes)
        self.loader.send(
            Grant(
                transfer_id=announced.transfer_id,
                attempt=announced.attempt,
                slot=granted,
                path="store",
                address="",
                lease_s=10.0,
            )
        )

    def heard(self) -> list[AnyMessage]:
        """Return what the loader says once a thread has ended."""
        assert self.news.acquire(timeout=DEADLINE_S)
        return self.said()

    def said(self) -> list[AnyMessage]:
        received = self.loader.receive()
        assert all(identity == IDENTITY for identity, _ in received)
        return [message for _, message in received]

    def count(self, result: str) -> float:
        found = self.registry.get_sample_value("epd_pd_store_items_total", {"result": result})
        return found or 0.0


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*names: str) -> Side:
        made.append(Side(MemoryStore(*map(entry, names))))
        return made[-1]

    yield make
    for each in made:
        each.loader.close()


def codes(messages: list[AnyMessage]) -> list[NackCode]:
    assert all(isinstance(message, Nack) for message in messages), messages
    return [message.code for message in messages if isinstance(message, Nack)]


NOT_STORED, RELEASED = NackCode.NOT_STORED, NackCode.RELEASED


def test_a_granted_slot_is_filled_and_nothing_else(side: Callable[..., Side]) -> None:
    one = side("cat")
    announced = one.announce("cat")
    assert (announced.mm_hash, announced.tensor) == ("cat", SPEC)
    assert one.loader.is_its_own(announced.producer)
    assert one.store.asked == 0
    one.grant(announced, generation=7, offset=SPEC.nbytes)
    [written] = one.heard()
    assert isinstance(written, Written)
    assert (written.transfer_id, written.attempt) == ("t-cat", announced.attempt)
    assert written.generation == 7
    zeros = bytes(SPEC.nbytes)
    assert bytes(one.slots.data) == zeros + b"\1" * SPEC.nbytes + 2 * zeros
    assert one.count("hit") == 1
    assert one.registry.get_sample_value("epd_pd_store_loaded_bytes_total") == SPEC.nbytes


def test_an_entry_that_has_gone_is_told_and_the_store_is_well(side: Callable[..., Side]) -> None:
    one = side()
    one.grant(one.announce("cat"))
    assert codes(one.heard()) == [NOT_STORED, RELEASED]
    assert (one.count("miss"), one.breaker.state) == (1, "closed")


DOG = entry("dog", fill=2)
SPOILED: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    "a byte of the payload": lambda head, payload: (head, payload[:-1] + b"\0"),
    "a word of the head": lambda head, payload: (head.replace(b"cat", b"dog"), payload),
    "cut": lambda head, payload: (head, payload[:-4]),
    "another entry": lambda head, payload: (DOG.head, bytes(DOG.payload)),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_damaged_entry_is_removed(side: Callable[..., Side], spoiled: str) -> None:
    one = side("cat")
    one.store.entries[key("cat")] = SPOILED[spoiled](*one.store.entries[key("cat")])
    one.grant(one.announce("cat"))
    assert codes(one.heard()) == [NOT_STORED, RELEASED]
    assert one.store.discarded == [key("cat")]
    assert (one.count("corrupt"), one.breaker.state) == (1, "closed")


def test_an_entry_of_another_item_or_shape_is_refused(side: Callable[..., Side]) -> None:
    one = side("cat")
    other = TensorSpec(shape=(8, 4), dtype="float32")
    one.grant(one.announce("cat", tensor=other))
    assert codes(one.heard()) == [NOT_STORED, RELEASED]
    one.grant(one.announce("dog", at=key("cat")))
    assert codes(one.heard()) == [NOT_STORED, RELEASED]


def test_entries_of_other_engines_are_not_even_asked_for(side: Callable[..., Side]) -> None:
    one = side("cat")
    foreign = SEAL.key(SEAL.namespace("other weights"), "cat", "image")
    refused = one.loader.load("t", foreign, "cat", SPEC)
    assert isinstance(refused, Nack) and refused.code is NOT_STORED
    assert (one.store.asked, one.count("corrupt")) == (0, 1)


def test_a_late_load_is_given_up_and_its_slot_comes_back(side: Callable[..., Side]) -> None:
    one = side("cat")
    one.store.gate.clear()
    one.grant(one.announce("cat"))
    until(lambda: one.store.asked)
    one.clock.now += 0.99 * TIMEOUT_S
    assert one.said() == []
    one.clock.now += 0.02 * TIMEOUT_S
    assert codes(one.said()) == [NOT_STORED]
    assert one.said() == []
    refused = one.loader.load("t-2", key("cat"), "cat", SPEC)
    assert isinstance(refused, Nack), "it is left alone"
    one.store.gate.set()
    assert codes(one.heard()) == [RELEASED]
    assert one.breaker.state == "open", "what comes too late does not say that it is well"
    assert (one.count("error"), one.count("unavailable")) == (1, 1)


def test_after_a_while_one_tries_again_and_then_all(
    side: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    one = side("cat", "dog", "bird")
    one.store.error = StoreError("gone")
    one.grant(one.announce("cat"))
    assert codes(one.heard()) == [NOT_STORED, RELEASED]
    assert one.breaker.state == "open"
    assert "items are not loaded from the store for a while: gone" in caplog.text
    one.clock.now += 1.01
    one.store.error = None
    one.store.gate.clear()
    announced = [one.announce("cat"), one.announce("dog")]
    for each in announced:
        one.grant(each)
    assert codes(one.said()) == [NOT_STORED, RELEASED]
    assert isinstance(one.loader.load("t-3", key("bird"), "bird", SPEC), Nack)
    until(lambda: one.store.asked == 2)
    one.store.gate.set()
    assert one.registry.get_sample_value("epd_pd_store_breaker") == 2
    assert [type(message) for message in one.heard()] == [Written]
    assert one.breaker.state == "closed"
    assert one.registry.get_sample_value("epd_pd_store_breaker") == 0


def test_a_load_that_is_given_up_closes_the_breaker(side: Callable[..., Side]) -> None:
    one = side("cat")
    one.breaker.failed()
    one.clock.now += 1.01
    one.store.gate.clear()
    announced = one.announce("cat")
    one.grant(announced)
    until(lambda: one.store.asked)
    one.loader.send(
        Abort(transfer_id="t-cat", attempt=announced.attempt, reason="not needed any more")
    )
    assert one.said() == [], "a thread writes there"
    one.store.gate.set()
    assert codes(one.heard()) == [RELEASED]
    assert one.breaker.state == "closed"


def test_load_cancelled_before_its_turn_is_not_requested(side: Callable[..., Side]) -> None:
    one = side("cat")
    announced = one.announce("cat")
    one.loader.send(Later(transfer_id="t-cat", attempt=announced.attempt))
    one.loader.send(NotNeeded(transfer_id="t-cat", attempt=announced.attempt))
    one.grant(announced)
    assert (one.said(), one.store.asked) == ([], 0)


def test_a_forgotten_slot_is_free(side: Callable[..., Side]) -> None:
    one = side()
    one.loader.send(Abort(transfer_id="t", attempt=99, reason="again"))
    assert codes(one.said()) == [RELEASED]


def test_a_store_that_blocks_all_threads_holds_no_other_slot(side: Callable[..., Side]) -> None:
    names = ["cat", "dog", "bird", "fish"]
    one = side(*names)
    one.store.gate.clear()
    announced = [one.announce(name) for name in names]
    for generation, each in enumerate(announced[:3], 1):
        one.grant(each, generation=generation)
    until(lambda: one.store.asked == 2)
    one.clock.now += 1.01 * TIMEOUT_S
    assert sorted(codes(one.said())) == sorted([*3 * [NOT_STORED], RELEASED])
    one.clock.now += 3600.0
    one.grant(announced[3], generation=4)
    assert codes(one.said()) == [NOT_STORED, RELEASED]
    assert isinstance(one.loader.load("t-5", key("cat"), "cat", SPEC), Nack)
    assert one.count("unavailable") == 2
    one.store.gate.set()
    assert codes(one.heard() + one.heard()) == [RELEASED, RELEASED]
    one.grant(one.announce("cat"), generation=5)
    assert [type(message) for message in one.heard()] == [Written]
