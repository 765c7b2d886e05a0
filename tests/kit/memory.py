"""The receive pool's memory, and the worker that reads it: both remember whose bytes are where."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from epd_portable.wire.descriptors import SlotDescriptor

UNIT_BYTES = 64
"""Every slot begins at a multiple of it."""
TORN = "(half written)"
PARTIAL = "(in some ranks)"


class Violation(AssertionError):
    """Violation of an invariant."""


class PoolMemory:
    """Bytes of the receive pool, in units: which item's they are, and whose slot they were last.

    Attributes:
        weights: Number of the weights that all engines have.
    """

    def __init__(self) -> None:
        self.weights = 0
        self._bytes: dict[int, str] = {}
        self._owner: dict[int, int] = {}

    def granted(self, slot: SlotDescriptor) -> None:
        """A producer hears that it may write; grants may be repeated."""
        for unit in _units(slot):
            if self._owner.get(unit, 0) < slot.generation:
                self._owner[unit] = slot.generation

    def write(self, slot: SlotDescriptor, content: str) -> None:
        """A producer writes its slot, a part of it if the content is `TORN`."""
        for unit in _units(slot):
            if self._owner.get(unit) != slot.generation:
                raise Violation(
                    f"a slot of grant {slot.generation} is written that is granted anew"
                )
            self._bytes[unit] = content

    def output(self, name: str) -> str:
        """Return the bytes that an encoder computes of an item with today's weights."""
        return f"{name} by weights {self.weights}"

    def read(self, slot: SlotDescriptor) -> str:
        """Return what stands in a slot: one item, or a mixture."""
        found = {self._bytes.get(unit, "(nothing)") for unit in _units(slot)}
        return found.pop() if len(found) == 1 else " + ".join(sorted(found))


def _units(slot: SlotDescriptor) -> range:
    return range(slot.offset // UNIT_BYTES, -(-(slot.offset + slot.nbytes) // UNIT_BYTES))


@dataclass(frozen=True)
class Read:
    """A request computes tokens of an item; those that only a drafter reads may be missing."""

    request_id: str
    name: str
    by_drafter: bool = False


@dataclass
class Work:
    """Work of a worker in one step.

    Attributes:
        planned: The step, as vLLM's scheduler put it out.
        encoded: Items that it encodes.
        reads: Items that it computes with.
        samples: Requests that get a token by it.
        placed: Items encoded beside the steps that are there since this one.
        failed: Those that could not be encoded so.
    """

    planned: Any
    encoded: list[str]
    reads: list[Read]
    samples: set[str]
    is_done: bool = False
    placed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Media:
    """Media of requests' items, as a model runner has them.

    Those that vLLM leaves out of a step are missing here too: of items that a prefix hit covers
    (0.29 on), and that were computed (0.33, second runner).
    """

    def __init__(self) -> None:
        self._features: dict[str, list[Any]] = {}

    def update(self, planned: Any) -> None:
        """Take in what a step brings and drops."""
        for request_id in planned.finished_req_ids:
            self._features.pop(request_id, None)
        for new in planned.scheduled_new_reqs:
            self._features[new.req_id] = list(new.mm_features)
        for request_id, updates in getattr(planned, "encoder_input_updates", {}).items():
            for index, data in updates.items():
                self._put(request_id, index, data)
        for each in planned.ec_connector_metadata.media:
            each.put(self._features[each.request_id])

    def check(self, planned: Any) -> None:
        """Raise `Violation` if the step encodes an item whose media are missing."""
        for request_id, indices in planned.scheduled_encoder_inputs.items():
            for index in indices:
                data = self._features[request_id][index].data
                if data is None or "pixel_values" not in data:
                    raise Violation(f"{request_id} encodes item {index}, whose media are missing")

    def _put(self, request_id: str, index: int, data: Any) -> None:
        features = self._features[request_id]
        features[index] = replace(features[index], data=data)


class Worker:
    """A worker's encoder cache: views of slots, copies of them, or outputs of its own.

    Where it copies, it may do so as late as in the next step that computes.
    """

    def __init__(self, rng: Random, pool: PoolMemory, *, copies: bool, fails: bool) -> None:
        self._rng, self._pool, self._copies, self._fails = rng, pool, copies, fails
        self._cache: dict[str, str | SlotDescriptor] = {}
        self._to_copy: dict[str, SlotDescriptor] = {}
        self._encoding: deque[str] = deque()
        self._sending: list[str] = []
        self._media = Media()
        self.revoked: set[int] = set()
        """Grants that were taken back: what the worker itself receives is not written for them."""
        self.ranks = 1
        """Number of ranks, of which each encodes the items that are not encoded next to steps."""
        self._outdated: set[str] = set()
        """Encoded in the background when weights changed."""
        self.fails_once: set[str] = set()
        """Items that one rank cannot encode the next time."""
        self.hangs = False
        """No item is encoded in the background."""
        self.seen: Counter[str] = Counter()

    @property
    def is_encoding(self) -> bool:
        return bool(self._encoding)

    @property
    def is_sending(self) -> bool:
        return bool(self._sending)

    def execute(self, work: Work) -> None:
        """Execute a step."""
        planned = work.planned
        self._media.update(planned)
        self._media.check(planned)
        orders = planned.ec_connector_metadata.receipts
        self.revoked.update(orders.revoked)
        for placement in orders.placements:
            self._cache[placement.mm_hash] = placement.slot
            self.seen["items placed"] += 1
            if self._copies:
                self._to_copy[placement.mm_hash] = placement.slot
        if orders.computes or self._rng.random() < 0.5:
            self._copy()
        self._encoding.extend(each.mm_hash for each in orders.encodings)
        while self._encoding and not self.hangs and self._rng.random() < 0.5:
            name = self._encoding.popleft()
            once = name in self.fails_once
            if once or name in self._outdated or (self._fails and self._rng.random() < 0.2):
                self._outdated.discard(name)
                self.fails_once.discard(name)
                work.failed.add(name)
                if self.ranks > 1 and (once or self._rng.random() < 0.5):
                    work.placed.add(name)
                    self._cache[name] = PARTIAL
                    self.seen["items encoded by some ranks"] += 1
            else:
                self._cache[name] = self._pool.output(name)
                work.placed.add(name)
                self.seen["items encoded beside a step"] += 1
        for order in planned.ec_connector_metadata.orders:
            self._send(order.transfer_id, order.mm_hash)
        for name in planned.free_encoder_mm_hashes:
            self._cache.pop(name, None)
            self._to_copy.pop(name, None)
        self._cache.update((name, self._pool.output(name)) for name in work.encoded)
        self.seen["items encoded in a step"] += len(work.encoded)
        for read in work.reads:
            self._read(read)
        work.is_done = True

    def take_sent(self) -> set[str]:
        """Return some of the transfers to others, which have ended."""
        sent = {each for each in self._sending if self._rng.random() < 0.2}
        self._sending = [each for each in self._sending if each not in sent]
        return sent

    def forget(self) -> None:
        """The engine resets its encoder caches."""
        self._cache.clear()
        self._to_copy.clear()
        self._outdated.update(self._encoding)

    def _copy(self) -> None:
        for name, slot in self._to_copy.items():
            if self._cache.get(name) is slot:
                self._cache[name] = self._pool.read(slot)
        self._to_copy.clear()

    def _send(self, transfer_id: str, name: str) -> None:
        found = self._cache.get(name)
        content = self._pool.read(found) if isinstance(found, SlotDescriptor) else found
        # One rank sends, and what it has is whole.
        if content not in (self._pool.output(name), PARTIAL, None):
            raise Violation(f"{transfer_id} sends {content} as {name}")
        self.seen["items sent to others" if content else "items that others do not get"] += 1
        self._sending.append(transfer_id)

    def _read(self, read: Read) -> None:
        found = self._cache.get(read.name)
        if found is None:
            if read.by_drafter:
                return
            raise Violation(f"{read.request_id} computes with {read.name}, which no worker has")
        content = found if isinstance(found, str) else self._pool.read(found)
        if content != self._pool.output(read.name):
            raise Violation(f"{read.request_id} computes with {read.name} and reads {content}")
        self.seen["items read"] += 1
