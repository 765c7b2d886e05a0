"""Copies that an encode worker's device makes by itself: who queues them, and who says *written*.

Real sender, receiver and placer between two simulated devices: an encode worker in a process of its
own, and a PD instance without an engine in this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.contract.pairs import Pair, Route
from tests.kit.encode_side import WIDTH, output
from tests.kit.ends import PrefillSide
from tests.npu_sim.transfer.ends import Encode

IPC, SHM = (Route(path, Pair("npu", "npu")) for path in ("ipc", "shm"))
LATE_S = 0.6
TOKENS = 30


@pytest.fixture(scope="module", params=[IPC], ids=str)
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.fixture
def encode(route: Route, pd: PrefillSide) -> Iterator[Encode]:
    """Yield an instance that has written the PD instance's memory before."""
    made = Encode(route.path)
    order(made, pd, "before")
    made.put_out("before", f"output('before', {TOKENS})")
    arrives(pd, "before")
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    made.wait_until_ended("t-before")
    assert steps(made) == [("queued", "epd-writer"), ("written", "epd-writer")]
    yield made
    made.close()


def order(encode: Encode, pd: PrefillSide, name: str) -> None:
    """A request for an item comes, and the order of it."""
    pd.arrive(name, name, TOKENS)
    encode.order(f"t-{name}", name, pd.address, (TOKENS, WIDTH))


def grant(encode: Encode, pd: PrefillSide, *names: str) -> None:
    """The same, and both ends know that they may be written."""
    for name in names:
        order(encode, pd, name)
    for name in names:
        pd.step_until(lambda name=name: pd.granted(f"t-{name}"))
        encode.wait_until_granted(f"t-{name}")


def arrives(pd: PrefillSide, name: str) -> None:
    pd.step_until(lambda: name in pd.placed)
    assert torch.equal(pd.encoder_cache[name].cpu(), output(name, TOKENS))


def steps(encode: Encode) -> list[tuple[str, str]]:
    """Return the actions since the last call, with their threads."""
    return [(what, thread) for what, thread, _ in encode.notes()]


def test_copy_of_a_granted_item_is_queued_by_the_encoder(encode: Encode, pd: PrefillSide) -> None:
    grant(encode, pd, "cat")
    assert steps(encode) == []
    encode.put_out("cat", f"output('cat', {TOKENS})")
    arrives(pd, "cat")
    assert steps(encode) == [("queued", "MainThread"), ("written", "epd-watcher")]


def test_grant_queues_the_copy_of_an_offered_item(encode: Encode, pd: PrefillSide) -> None:
    order(encode, pd, "cat")
    encode.put_out("cat", f"output('cat', {TOKENS})")
    assert steps(encode) == []
    arrives(pd, "cat")
    assert steps(encode) == [("queued", "epd-sender"), ("written", "epd-watcher")]


@pytest.mark.parametrize("route", [SHM], ids=str, indirect=True)
def test_blocking_copy_is_made_by_a_writer_thread(encode: Encode, pd: PrefillSide) -> None:
    grant(encode, pd, "cat")
    assert encode.put_out_all(["cat"], TOKENS, int(LATE_S * 1e6)) < LATE_S
    arrives(pd, "cat")
    assert steps(encode) == [("queued", "epd-writer"), ("written", "epd-writer")]


def test_written_is_sent_at_the_end_of_each_copy_without_waiting(
    encode: Encode, pd: PrefillSide
) -> None:
    names = ["cat", "dog", "emu"]
    grant(encode, pd, *names)
    begin_s = time.monotonic()
    took_s = encode.put_out_all(names, TOKENS, int(LATE_S * 1e6))
    assert took_s < len(names) * LATE_S, "it waited until the last one was computed"
    for name in names:
        arrives(pd, name)
    notes = encode.notes()
    assert [what for what, *_ in notes] == ["queued"] * 3 + ["written"] * 3
    assert {thread for what, thread, _ in notes if what == "written"} == {"epd-watcher"}
    told_s = [when for what, _, when in notes if what == "written"]
    for number, when in enumerate(told_s, start=1):
        assert when - begin_s >= number * LATE_S, "the device had not computed it yet"
    assert pd.placed == ["before", *names]


def test_a_slot_comes_back_only_when_the_copy_into_it_has_ended(
    encode: Encode, pd: PrefillSide
) -> None:
    grant(encode, pd, "cat")
    begin_s = time.monotonic()
    encode.put_out_all(["cat"], TOKENS, int(2 * LATE_S * 1e6))
    pd.finish("cat")
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    assert time.monotonic() - begin_s >= 2 * LATE_S, "the device was still about to write it"
    encode.wait_until_ended("t-cat")
    assert "aborted by the consumer" in encode.said()


@pytest.mark.parametrize(
    "call",
    ["copies.DeviceCopies.queue", "copies.QueuedCopy.finish", "writers.trace", "writers._ended"],
)
def test_a_copy_that_fails_ends_its_transfer_and_no_other(
    encode: Encode, pd: PrefillSide, call: str
) -> None:
    encode.run("from epd_portable.transfer import copies")
    encode.run("from epd_portable.errors import PlatformError")
    encode.run("from epd_portable.encode import writers")
    encode.run(f"real = {call}")
    encode.run(
        "def fail(*args, **options):\n"
        f"    {call} = real\n"
        "    raise PlatformError('the device is broken')"
    )
    encode.run(f"{call} = fail")
    grant(encode, pd, "cat", "dog")
    assert encode.put_out_all(["cat", "dog"], TOKENS, 0) < LATE_S
    arrives(pd, "dog")
    encode.wait_until_ended("t-cat")
    assert "transfer t-cat ended: the device is broken" in encode.said()
    pd.step_until(lambda: pd.prefill.may_schedule("cat", 1))
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    grant(encode, pd, "emu")
    encode.put_out("emu", f"output('emu', {TOKENS})")
    arrives(pd, "emu")
    assert steps(encode)[-2:] == [("queued", "MainThread"), ("written", "epd-watcher")]


def test_closing_worker_waits_for_its_queued_copies(encode: Encode, pd: PrefillSide) -> None:
    grant(encode, pd, "cat")
    begin_s = time.monotonic()
    encode.put_out_all(["cat"], TOKENS, int(2 * LATE_S * 1e6))
    encode.close()
    assert time.monotonic() - begin_s >= 2 * LATE_S
    arrives(pd, "cat")
