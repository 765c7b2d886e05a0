"""Duties of every transfer path: one suite over paths, pairs of platforms, dtypes and sizes.

The producer is in this process, the consumer always in one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from epd_portable.errors import LeaseExpiredError, NoCommonPathError, TransportError
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer import connections, registry
from epd_portable.transfer.copies import QueuedCopy
from epd_portable.transfer.paths.base import PathWriter, SlotWrite
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.wire.descriptors import SlotDescriptor
from tests.contract.pairs import REFUSED, ROUTES, Route, encode_peer, parameters, turn
from tests.contract.path_consumer import CONTEXT, DEADLINE_S, MIB, Consumer, digest
from tests.receiving import slot_write
from tests.waiting import until

GUARD = 512
FILL = 0xA5
WIDTH = 128
ROW_BYTES = WIDTH * 4
PROMPT_S = 60.0
"""A call whose deadline is within two seconds has ended by then, on a busy machine too."""


@pytest.fixture(scope="module", params=parameters(ROUTES, mixed_in_full=True))
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.fixture(scope="module")
def shared(route: Route) -> Iterator[Consumer]:
    """Yield a consumer for all tests of a route that leave it as they found it."""
    made = Consumer(route)
    yield made
    made.close()


@pytest.fixture
def consumer(shared: Consumer) -> Consumer:
    return shared


@pytest.fixture(scope="module")
def writer(route: Route) -> Iterator[PathWriter]:
    made = route.writer()
    yield made
    made.close()


@pytest.fixture
def make_consumer(route: Route) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(**changes: object) -> Consumer:
        made.append(Consumer(route, **{"pool_bytes": 4 * MIB, **changes}))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


@functools.lru_cache(maxsize=8)
def host_tensor(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, WIDTH, generator=generator).to(dtype)


def source(writer: PathWriter, num_tokens: int, **options: int) -> torch.Tensor:
    return host_tensor(num_tokens, **options).to(writer.copies.device)


def nbytes(src: torch.Tensor) -> int:
    return src.numel() * src.element_size()


def write(
    writer: PathWriter,
    consumer: Consumer,
    src: torch.Tensor,
    slot: SlotDescriptor,
    seconds: float = 30.0,
) -> None:
    writer.write(slot_write(writer.copies, src, slot, consumer.address, seconds))


def within_guards(content: torch.Tensor) -> str:
    """Digest of an item between two guards."""
    guard = bytes([FILL]) * GUARD
    return hashlib.sha256(
        guard + content.view(-1).view(torch.uint8).numpy().data + guard
    ).hexdigest()


def opened_by_this_process() -> tuple[int, int]:
    """Return how many sockets (ZMQ's own events among them) and mappings of pools it has."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The listing's own.
            links.append(str(file.readlink()))
    mappings = Path("/proc/self/maps").read_text().count(f"{SHM_FOLDER}/epd-test-")
    return sum(link.startswith(("socket:", "anon_inode:")) for link in links), mappings


def untouched(size: int) -> str:
    return hashlib.sha256(bytes([FILL]) * size).hexdigest()


def assert_serves(writer: PathWriter, consumer: Consumer) -> None:
    """The path still works between the two."""
    src = host_tensor(7, seed=7)
    slot = consumer.grant(GUARD, nbytes(src))
    write(writer, consumer, src.to(writer.copies.device), slot)
    assert consumer.digest(GUARD, nbytes(src)) == digest(src)


@pytest.mark.parametrize("refused", parameters(REFUSED))
def test_pair_that_path_does_not_connect_is_refused_with_reason(refused: Route) -> None:
    producer = encode_peer(refused.pair.encode, _offered(refused.pair.encode))
    ends = _offered(refused.pair.prefill)
    consumer = msgspec.structs.replace(
        encode_peer(refused.pair.prefill, ends), instance="prefill_decode-0"
    )
    with pytest.raises(NoCommonPathError) as caught:
        registry.choose(producer, consumer, [registry.entry(refused.path)])
    assert refused.pair.refusal(refused.path) in str(caught.value)


def test_every_pair_here_has_a_path() -> None:
    assert {route.path for route in ROUTES} >= {"shm", "tcp"}
    assert {route.pair for route in ROUTES} == {route.pair for route in (*ROUTES, *REFUSED)}


def _offered(platform: str) -> list[str]:
    return [entry.name for entry in registry.offered("auto", platform)]


# 40 MiB of float32; the same tokens in half the bytes end inside a chunk of any path.
SIZES = [1, 1024, 8 * MIB // ROW_BYTES + 1, 40 * MIB // ROW_BYTES]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CONTENTS = [(size, DTYPES[(n + m) % 3]) for m in range(3) for n, size in enumerate(SIZES)]
"""Every number of tokens with every dtype; four in a row hold all of both."""


@pytest.mark.parametrize("route", parameters(ROUTES), indirect=True)
@pytest.mark.parametrize("nth", range(4))
def test_item_arrives_bit_for_bit_beside_untouched_neighbours(
    route: Route, writer: PathWriter, consumer: Consumer, nth: int
) -> None:
    num_tokens, dtype = turn(route, CONTENTS, nth, 4)
    src = host_tensor(num_tokens, dtype)
    consumer.fill(nbytes(src) + 2 * GUARD, FILL)
    slot = consumer.grant(GUARD, nbytes(src))
    write(writer, consumer, src.to(writer.copies.device), slot)
    assert consumer.digest(0, nbytes(src) + 2 * GUARD) == within_guards(src)
    placed, device = consumer.place(slot, src)
    assert placed == digest(src)
    assert device.partition(":")[0] == TRAITS[route.pair.prefill].device_type


def test_second_rank_places_the_item(
    writer: PathWriter, consumer: Consumer, make_consumer: Callable[..., Consumer]
) -> None:
    src = host_tensor(100, torch.bfloat16)
    slot = consumer.grant(GUARD, nbytes(src))
    write(writer, consumer, src.to(writer.copies.device), slot)
    rank = make_consumer(pool=consumer.pool, rank=1, device_index=0, pool_bytes=48 * MIB)
    assert rank.place(slot, src)[0] == consumer.place(slot, src)[0] == digest(src)


def test_the_source_is_not_changed_and_may_be_written_again(
    writer: PathWriter, consumer: Consumer
) -> None:
    src = source(writer, 100)
    before = digest(src)
    for offset in (0, nbytes(src)):
        slot = consumer.grant(offset, nbytes(src))
        write(writer, consumer, src, slot)
        assert consumer.digest(offset, nbytes(src)) == before
    assert digest(src) == before


def test_several_threads_may_write_at_once(
    route: Route, writer: PathWriter, consumer: Consumer
) -> None:
    sources = [source(writer, 3000 + number, seed=number) for number in range(6)]
    slots = [consumer.grant(number * 2 * MIB, nbytes(src)) for number, src in enumerate(sources)]

    def work(src: torch.Tensor, slot: SlotDescriptor) -> None:
        writer.copies.platform.set_device(0)
        write(writer, consumer, src, slot)

    with ThreadPoolExecutor(len(sources)) as threads:
        assert list(threads.map(work, sources, slots)) == [None] * len(sources)
    for src, slot in zip(sources, slots, strict=True):
        assert consumer.digest(slot.offset, slot.nbytes) == digest(src)


def test_writer_serves_two_consumers(
    writer: PathWriter, consumer: Consumer, make_consumer: Callable[..., Consumer]
) -> None:
    both = [consumer, make_consumer()]
    sources = [source(writer, 10, seed=seed) for seed in (1, 2)]
    slots = [each.grant(0, nbytes(sources[0])) for each in both]
    for each, src, slot in zip(both, sources, slots, strict=True):
        write(writer, each, src, slot)
    for each, src, slot in zip(both, sources, slots, strict=True):
        assert each.digest(slot.offset, slot.nbytes) == digest(src)


# Not `collective`: torch_npu makes few groups in a process in which one has failed.
ONE_SIDED = parameters(
    [each for each in ROUTES if registry.entry(each.path).one_sided], mixed_in_full=True
)


def queue(
    writer: PathWriter,
    consumer: Consumer,
    src: torch.Tensor,
    slot: SlotDescriptor,
    seconds: float = 30.0,
) -> QueuedCopy | None:
    return writer.queue(slot_write(writer.copies, src, slot, consumer.address, seconds))


@pytest.mark.parametrize("route", ONE_SIDED, indirect=True)
def test_new_consumer_is_opened_by_a_blocking_write_only(route: Route, consumer: Consumer) -> None:
    writer = route.writer()
    consumer.fill(MIB, FILL)
    src = source(writer, 10)
    slot = consumer.grant(0, nbytes(src))
    assert queue(writer, consumer, src, slot) is None
    assert consumer.digest(0, MIB) == untouched(MIB)
    write(writer, consumer, src, slot)
    copy = queue(writer, consumer, src, consumer.grant(0, nbytes(src)))
    assert (copy is not None) == route.queues
    if copy is not None:
        copy.finish()
    writer.close()


@pytest.mark.parametrize("num_tokens", [1, 1024, 40 * MIB // ROW_BYTES])
def test_queued_write_has_arrived_when_finished_or_never_began(
    route: Route, writer: PathWriter, consumer: Consumer, num_tokens: int
) -> None:
    assert_serves(writer, consumer)
    src = host_tensor(num_tokens, seed=3)
    size = nbytes(src) + 2 * GUARD
    consumer.fill(size, FILL)
    slot = consumer.grant(GUARD, nbytes(src))
    copy = queue(writer, consumer, src.to(writer.copies.device), slot)
    assert (copy is not None) == route.queues
    if copy is not None:
        copy.finish()
    assert consumer.digest(0, size) == (within_guards(src) if copy else untouched(size))


def test_a_copy_is_not_queued_too_late_nor_one_that_does_not_fit(
    route: Route, writer: PathWriter, consumer: Consumer
) -> None:
    assert_serves(writer, consumer)
    src = source(writer, 4)
    slot = consumer.grant(0, nbytes(src))
    consumer.fill(MIB, FILL)
    outside = msgspec.structs.replace(slot, offset=1 << 40)
    refused: list[tuple[torch.Tensor, SlotDescriptor, float, type[Exception], str]] = [
        (src, slot, 0.0, LeaseExpiredError, "ended before"),
        (source(writer, 3), slot, 30.0, ValueError, "bytes"),
        (src, outside, 30.0, ValueError, "outside"),
    ]
    for what, where, seconds, error, why in refused:
        if route.queues:
            with pytest.raises(error, match=why):
                queue(writer, consumer, what, where, seconds)
        else:
            assert queue(writer, consumer, what, where, seconds) is None, "a write finds out"
    assert consumer.digest(0, MIB) == untouched(MIB)


@pytest.mark.parametrize("route", ONE_SIDED, indirect=True)
def test_a_consumer_that_has_gone_is_left_to_a_write_to_find_out(
    writer: PathWriter, make_consumer: Callable[..., Consumer]
) -> None:
    consumer = make_consumer()
    assert_serves(writer, consumer)
    src = source(writer, 10)
    slot = consumer.grant(0, nbytes(src))
    consumer.close()
    assert queue(writer, consumer, src, slot) is None


def test_an_expired_lease_is_refused_and_touches_nothing(
    writer: PathWriter, consumer: Consumer
) -> None:
    src = source(writer, 4)
    slot = consumer.grant(0, nbytes(src))
    consumer.fill(nbytes(src), FILL)
    for late_s in (0.0, -1.0):
        with pytest.raises(LeaseExpiredError):
            write(writer, consumer, src, slot, seconds=late_s)
    assert consumer.digest(0, nbytes(src)) == untouched(nbytes(src))


class Ticking:
    """A clock that goes on by a second, or does something, each time it is looked at."""

    def __init__(self, then: Callable[[int], float]) -> None:
        self.looks = 0
        self._then = then

    def __call__(self) -> float:
        self.looks += 1
        return self._then(self.looks)


@pytest.mark.parametrize("seconds", [1.0, 2.0, 4.0])
def test_a_lease_that_ends_during_the_write_ends_the_write(
    route: Route, consumer: Consumer, seconds: float
) -> None:
    # What copies in one piece looks at the clock before it and after it.
    in_one_piece = route.in_one_piece
    tick_s = 2.0 if in_one_piece else 1.0
    writer = route.writer(Ticking(lambda look: tick_s * look))
    src = source(writer, 40 * MIB // ROW_BYTES)
    with pytest.raises(TransportError):
        write(writer, consumer, src, consumer.grant(0, nbytes(src)), seconds)
    writer.close()


@pytest.mark.parametrize("at", [3, 5, 8, 9, 10])
@pytest.mark.parametrize(
    "route", parameters(route for route in ROUTES if route.fenced), indirect=True
)
def test_revoked_slot_is_untouched_by_a_fenced_write(
    route: Route, consumer: Consumer, at: int
) -> None:
    src_bytes = 20 * MIB
    consumer.fill(src_bytes, FILL)
    slot = consumer.grant(0, src_bytes)
    seen: list[str] = []

    def take_back(look: int) -> float:
        if look == at:
            consumer.take_back(slot)
            seen.append(consumer.digest(0, src_bytes))
        return time.monotonic()

    writer = route.writer(Ticking(take_back))
    src = source(writer, src_bytes // ROW_BYTES)
    try:
        write(writer, consumer, src, slot)
    except LeaseExpiredError:
        assert seen
        assert consumer.digest(0, src_bytes) == seen[0]
    else:
        assert consumer.digest(0, src_bytes) == digest(src), "it had all arrived before"
    writer.close()


@pytest.mark.parametrize(
    "route", parameters(route for route in ROUTES if route.fenced), indirect=True
)
def test_a_fenced_path_refuses_what_is_not_leased_and_goes_on(
    writer: PathWriter, consumer: Consumer
) -> None:
    src = source(writer, 10)
    slot = consumer.grant(0, nbytes(src))
    consumer.fill(nbytes(src), FILL)
    consumer.take_back(slot)
    with pytest.raises(LeaseExpiredError, match="not leased"):
        write(writer, consumer, src, slot)
    assert consumer.digest(0, nbytes(src)) == untouched(nbytes(src))
    assert_serves(writer, consumer)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda device: torch.zeros(3, WIDTH, device=device), "bytes"),
        (lambda device: torch.zeros(5, WIDTH, device=device), "bytes"),
        (lambda device: torch.zeros(4, WIDTH, dtype=torch.float16, device=device), "bytes"),
        (lambda device: torch.zeros(WIDTH, 4, device=device).t(), "not contiguous"),
        (lambda device: torch.zeros(8, WIDTH, device=device)[::2], "not contiguous"),
        (lambda device: torch.empty(4, WIDTH, device="meta"), "tensor is on meta"),
    ],
    ids=["smaller", "larger", "another dtype", "transposed", "strided", "another device"],
)
def test_a_tensor_that_is_not_what_was_granted_is_refused(
    writer: PathWriter, consumer: Consumer, make: Callable[[torch.device], torch.Tensor], why: str
) -> None:
    consumer.fill(8 * ROW_BYTES, FILL)
    slot = consumer.grant(0, 4 * ROW_BYTES)
    with pytest.raises(ValueError, match=why):
        write(writer, consumer, make(writer.copies.device), slot)
    assert consumer.digest(0, 8 * ROW_BYTES) == untouched(8 * ROW_BYTES)
    assert_serves(writer, consumer)


@pytest.mark.parametrize("offset", [-GUARD, 1 << 40], ids=["before", "behind"])
def test_slot_outside_memory_is_refused_and_path_continues(
    writer: PathWriter, consumer: Consumer, offset: int
) -> None:
    src = source(writer, 10)
    consumer.fill(MIB, FILL)
    slot = msgspec.structs.replace(consumer.grant(0, nbytes(src)), offset=offset)
    with pytest.raises((TransportError, ValueError)):
        write(writer, consumer, src, slot)
    assert consumer.digest(0, MIB) == untouched(MIB)
    assert_serves(writer, consumer)


@pytest.mark.parametrize("nth", range(3))
def test_an_address_that_is_none_is_an_error(
    route: Route, writer: PathWriter, consumer: Consumer, nth: int
) -> None:
    address = turn(route, ["", "nonsense", "tcp://*:x", "\ud800", "0", "::"], nth, 3)
    src = source(writer, 10)
    slot = consumer.grant(0, nbytes(src))
    with pytest.raises(TransportError):
        writer.write(slot_write(writer.copies, src, slot, address, 1))
    assert_serves(writer, consumer)


@pytest.mark.parametrize("end", [Consumer.kill, Consumer.close], ids=["killed", "closed"])
def test_ended_consumer_is_an_error_within_the_deadline(
    route: Route,
    writer: PathWriter,
    make_consumer: Callable[..., Consumer],
    end: Callable[[Consumer], None],
) -> None:
    consumer = make_consumer()
    src = source(writer, 10)
    slot = consumer.grant(0, nbytes(src))
    write(writer, consumer, src, slot)
    slot = consumer.grant(0, nbytes(src))
    end(consumer)
    begin_s = time.monotonic()
    # The pool of a killed one is still there: a write to it is not read.
    written = end is Consumer.kill and route.needs_nobody
    with nullcontext() if written else pytest.raises(TransportError):
        write(writer, consumer, src, slot, seconds=DEADLINE_S if written else 0.5)
    assert time.monotonic() - begin_s < PROMPT_S


def test_restarted_consumer_is_not_written_by_an_old_grant(
    route: Route, writer: PathWriter, make_consumer: Callable[..., Consumer]
) -> None:
    former = make_consumer()
    src = source(writer, 10)
    write(writer, former, src, former.grant(0, nbytes(src)))
    slot = former.grant(0, nbytes(src))
    former.kill()
    same = {"data_address": former.address} if route.path == "tcp" else {}
    anew = make_consumer(pool=former.pool, **same)
    anew.fill(MIB, FILL)
    with pytest.raises(TransportError):
        write(writer, former, src, slot, seconds=2.0)
    assert anew.digest(0, MIB) == untouched(MIB)
    assert_serves(writer, anew)


def test_closed_consumers_leave_nothing_in_their_producer(
    route: Route, make_consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONSUMERS", 1)
    # What failed writes of other tests hold in their tracebacks: agents end with their objects.
    gc.collect()
    writer = route.writer()
    held = []
    for _ in range(4):
        consumer = make_consumer()
        assert_serves(writer, consumer)
        held.append(opened_by_this_process())
        consumer.close()
    # Fewer is well: something of an earlier test may have ended meanwhile.
    until(lambda: all(map(int.__ge__, held[0], opened_by_this_process())))
    writer.close()


@pytest.mark.parametrize("at", [1, 9])
def test_consumer_that_stops_during_write_is_error_at_deadline(
    route: Route, make_consumer: Callable[..., Consumer], at: int
) -> None:
    consumer = make_consumer()

    def stop(look: int) -> float:
        if look == at:
            consumer.signal(signal.SIGSTOP)
        return time.monotonic()

    writer = route.writer(Ticking(stop))
    src = source(writer, 2 * MIB // ROW_BYTES)
    slot = consumer.grant(0, nbytes(src))
    needed = registry.entry(route.path).receiver
    begin_s = time.monotonic()
    try:
        write(writer, consumer, src, slot, seconds=2.0 if needed else DEADLINE_S)
    except TransportError:
        assert time.monotonic() - begin_s < PROMPT_S
        assert needed, "the consumer takes no part in this path"
    finally:
        writer.close()
        consumer.signal(signal.SIGCONT)
    again = route.writer()
    assert_serves(again, consumer)
    again.close()


@pytest.mark.parametrize("nth", range(2))
def test_a_producer_that_is_killed_during_a_write_harms_no_other(
    route: Route, writer: PathWriter, consumer: Consumer, nth: int
) -> None:
    at = turn(route, [3, 6, 8, 9, 10], nth, 2)
    size = 2 * MIB
    slot = consumer.grant(8 * MIB, size)
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(
        target=_write_and_die, args=(theirs, route, consumer.address, slot, at), daemon=True
    )
    process.start()
    theirs.close()
    assert ours.poll(DEADLINE_S), "the producer neither wrote nor died"
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    ours.close()
    begin_s = time.monotonic()
    consumer.take_back(slot)
    assert time.monotonic() - begin_s < PROMPT_S
    assert_serves(writer, consumer)


def _write_and_die(
    pipe: Connection, route: Route, address: str, slot: SlotDescriptor, at: int
) -> None:
    """A producer that is killed when it looks at the clock for the given time."""

    def die(look: int) -> float:
        if look == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return time.monotonic()

    writer = route.writer(Ticking(die))
    src = source(writer, slot.nbytes // ROW_BYTES)
    computed = writer.copies.platform.record_event()
    deadline_s = time.monotonic() + 30
    writer.write(
        SlotWrite(src=src, slot=slot, computed=computed, address=address, deadline_s=deadline_s)
    )
    os.kill(os.getpid(), signal.SIGKILL)
