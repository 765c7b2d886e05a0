"""Tables of both sides: as large as the work under way, for any number of earlier requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from epd_portable.encode.dispatcher import Dispatcher, EncodedItem
from epd_portable.items.transfers import MAX_ENDED
from tests.unit.builders import SECRET, encode_params, encoder_cache, request
from tests.unit.items.harness import Item, Pair, PrefillSide, spec

REQUESTS = 2_000
AT_ONCE = 20
GAP_S = 0.5
"""Between the arrivals of so many requests and the next: the latest 1,200 can still be late."""
FEW = 20 * AT_ONCE


class Holdings:
    """Everything that an object of the package reaches.

    Attributes:
        entries: Of each table, by its owner's class and its name there.
        objects: Of each class of the package.
    """

    def __init__(self, *roots: object) -> None:
        self.entries: Counter[str] = Counter()
        self.objects: Counter[str] = Counter()
        self._seen: set[int] = set()
        for root in roots:
            self._visit(root, "")

    def _visit(self, found: object, where: str) -> None:
        if id(found) in self._seen:
            return
        self._seen.add(id(found))
        if isinstance(found, dict | list | set | deque):
            self.entries[where] += len(found)
        if isinstance(found, dict):
            found = list(found.values())
        if isinstance(found, list | set | deque | tuple):
            for each in found:
                self._visit(each, where)
        elif type(found).__module__.startswith("epd_portable."):
            self.objects[type(found).__name__] += 1
            for name, value in attributes(found):
                self._visit(value, f"{type(found).__name__}.{name}")


def attributes(owner: object) -> Iterator[tuple[str, object]]:
    yield from getattr(owner, "__dict__", {}).items()
    for base in type(owner).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(owner, name):
                yield name, getattr(owner, name)


def serve(pair: Pair, items: list[Item]) -> None:
    """Let requests for an item each come and go, in all the ways that a transfer can end."""
    pd, encode = pair.pd, pair.encode
    for number, item in enumerate(items):
        if number % 5 == 4:  # Announced before its request, which never comes.
            encode.submit(item, ready=True)
            continue
        pd.arrive(item.mm_hash, item)
        if number % 5 in (0, 1):
            encode.submit(item, ready=True)
    pair.settle()
    for number, item in enumerate(items):
        if number % 5 == 1:  # The client has left; its item is here.
            pd.finish(item.mm_hash)
        elif number % 5 == 2:  # The client has left before the encoder began.
            pd.finish(item.mm_hash)
            encode.submit(item, ready=True)
        elif number % 5 == 3:  # Its encoder fails, and it is encoded here.
            encode.submit(item, ready=True)
    pair.round()
    for number, item in enumerate(items):
        if number % 5 == 3:
            encode.finish_write(item.transfer_id, "no such pool")
    pair.settle()
    for number, item in enumerate(items):
        if number % 5 == 3:
            assert pd.encode_here(item.mm_hash, 0)
        if number % 5 in (0, 3):
            pd.computed[item.mm_hash] = 1 + item.num_tokens
    pair.settle()
    for request_id in list(pd.requests):
        pd.finish(request_id)
    pair.settle()


def test_requests_that_have_ended_leave_nothing_that_grows() -> None:
    pair = Pair(PrefillSide(pool_tokens=4 * AT_ONCE, cache_tokens=4 * AT_ONCE))
    for first in range(0, REQUESTS, AT_ONCE):
        names = range(first, first + AT_ONCE)
        serve(pair, [Item(f"item-{each}", 2, f"transfer-{each}") for each in names])
        pair.pd.clock.now += GAP_S
        pair.encode.sent.clear()
        pair.encode.ended.clear()
        if first % 500 == 0:
            held = Holdings(pair.pd.shell, pair.encode.session)
            assert held.entries.pop("Transfers._ended") <= MAX_ENDED
            assert held.objects["ItemRequest"] <= FEW, held.objects
            assert held.objects["Transfer"] <= FEW, held.objects
            assert held.entries.total() <= 3 * FEW, held.entries
    assert held.objects["Item"] > 0, "what is idle in the cache is not seen"


def test_ended_work_leaves_nothing_in_an_encode_instance() -> None:
    cache = encoder_cache(10)
    dispatcher = Dispatcher(cache, SECRET)
    for number in range(REQUESTS):
        name, consumer = f"r-{number}", f"tcp://pd-{number}"
        item = EncodedItem(name, "image", spec(1))
        dispatcher.request_arrived(name, [item], encode_params({name: name}, consumer))
        asked = request(name, (name, 1))
        if number % 2:
            assert cache.can_allocate(asked, 0, 1, 0)
            cache.allocate(asked, 0)
            assert len(dispatcher.take_orders([name])) == 1
        dispatcher.request_finished(name)
        cache.free(asked)
        dispatcher.transfers_ended([name])
        cache.get_freed_mm_hashes()
    assert Holdings(dispatcher).entries.total() <= 4 * cache.cache_size
