"""Faults between two simulated devices, and their messages to the user.

Real sender, receiver and placer: an encode worker in a process of its own, and a PD instance
without an engine in this one. In every case the item is reported for encoding by the PD instance,
in bounded time, and those that are left serve the next item.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_portable.transfer.pool import SHM_FOLDER
from tests.contract.pairs import Pair, Route
from tests.kit.encode_side import WIDTH, output
from tests.kit.ends import PrefillSide
from tests.npu_sim.platform.children import Child
from tests.npu_sim.transfer.ends import Encode, do

ROUTES = [Route(path, Pair("npu", "npu")) for path in ("ipc", "collective")]
LEASE_S = 3.0
MARGIN_S = 1.0
"""A consumer's lease ends so much later than its producer's."""
LATE_US = 8_000_000
"""A computation that ends long after the lease."""
SOON_S = 12.0
"""Far less than any transfer may live, and enough for a machine with other things to do."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begin_s = time.monotonic()
    yield
    assert time.monotonic() - begin_s < seconds


@pytest.fixture(scope="module", params=ROUTES, ids=str)
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.fixture(scope="module")
def encode(route: Route) -> Iterator[Encode]:
    """Yield an instance that all tests share that leave it alive."""
    made = Encode(route.path)
    yield made
    made.close()


@pytest.fixture
def make_encode(route: Route) -> Iterator[Callable[..., Encode]]:
    with ExitStack() as opened:

        def make(**options: Any) -> Encode:
            made = Encode(route.path, **options)
            opened.callback(made.close)
            return made

        yield make


@pytest.fixture
def make_child() -> Iterator[Callable[..., Child]]:
    with ExitStack() as opened:
        yield lambda **settings: opened.enter_context(Child(**settings))


def open_pd(child: Child, route: Route, folder: Path) -> str:
    """Open a PD instance in a process, as ``pd``; return its pool."""
    do(child, "from pathlib import Path")
    do(child, "from tests.contract.pairs import Pair, Route")
    do(child, "from tests.kit.ends import PrefillSide")
    do(child, "from tests.kit.encode_side import output")
    do(child, f"pd = PrefillSide({route!r}, Path({str(folder)!r}), lease_s={LEASE_S})")
    return child.tell("pd.pool")


@pytest.fixture
def pd(route: Route, tmp_path: Path) -> Iterator[PrefillSide]:
    made = PrefillSide(route, tmp_path, lease_s=LEASE_S)
    yield made
    made.close()


def assert_serves(encode: Encode, pd: PrefillSide, name: str = "dog") -> None:
    """The two exchange an item."""
    pd.arrive(name, name, 30)
    encode.order(f"t-{name}", name, pd.address, (30, WIDTH))
    encode.put_out(name, f"output({name!r}, 30)")
    pd.step_until(lambda: name in pd.placed)
    assert torch.equal(pd.encoder_cache[name].cpu(), output(name, 30))


def given_up(pd: PrefillSide, request_id: str) -> Callable[[], bool]:
    """Return a condition: the PD instance encodes a request's only item itself."""
    return lambda: pd.prefill.may_schedule(request_id, 1)


def all_free(pd: PrefillSide) -> bool:
    return pd.free_bytes == pd.pool_bytes


def test_slot_is_freed_after_a_producer_outlasts_its_lease(
    route: Route, encode: Encode, pd: PrefillSide, caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(encode, pd, "before")
    pd.step_until(lambda: all_free(pd))
    pd.arrive("r", "cat", 10)
    encode.order("t-r", "cat", pd.address, (10, WIDTH))
    encode.put_out("cat", "output('cat', 10)", LATE_US)
    pd.step_until(lambda: pd.granted("t-r"))
    encode.wait_until_writing()
    with within(LEASE_S + MARGIN_S + SOON_S):
        pd.step_until(given_up(pd, "r"))
    if route.fenced:
        pd.step_until(lambda: all_free(pd))
    else:
        assert not all_free(pd), "the device may still write into the slot"
    with within(LATE_US / 1e6 + SOON_S):
        pd.step_until(lambda: all_free(pd))
        encode.wait_until_ended("t-r")
    assert pd.placed == ["before"]
    # Of `collective` the producer may be the first to tell, because it does not wait any longer.
    consumer_s = r"granted, but not written within 3\.0 s \(transfer\.lease_s\)"
    producer_s = r"device work was not complete after [23]\.\d+ s; the device is stuck, or .*"
    either = f"(?:{consumer_s}|{producer_s})" if route.fenced else consumer_s
    assert re.search(f"item cat by transfer t-r: {either}", caplog.text)
    taken_back = "aborted by the consumer: the slot was taken back"
    assert re.search(
        f"transfer t-r ended: (?:{taken_back}|aborted by the consumer: {either}|{producer_s})",
        encode.said(),
    )
    assert_serves(encode, pd)


def test_second_producer_serves_after_a_kill_of_the_first(
    make_encode: Callable[..., Encode],
    encode: Encode,
    pd: PrefillSide,
    caplog: pytest.LogCaptureFixture,
) -> None:
    killed = make_encode()
    assert_serves(killed, pd, "before")
    pd.arrive("r", "cat", 10)
    killed.order("t-r", "cat", pd.address, (10, WIDTH))
    killed.put_out("cat", "output('cat', 10)", LATE_US)
    pd.step_until(lambda: pd.granted("t-r"))
    killed.wait_until_writing()
    killed.kill()
    with within(LEASE_S + MARGIN_S + SOON_S):
        pd.step_until(given_up(pd, "r"))
        pd.step_until(lambda: all_free(pd))
    assert pd.placed == ["before"]
    assert "item cat by transfer t-r: granted, but not written within 3.0 s" in caplog.text
    assert_serves(encode, pd)


def test_killed_consumer_ends_its_own_transfer_only(
    route: Route,
    make_encode: Callable[..., Encode],
    make_child: Callable[..., Child],
    pd: PrefillSide,
    tmp_path: Path,
) -> None:
    life_s = 8.0
    encode = make_encode(wait_timeout_s=life_s)
    folder = tmp_path / "killed"
    folder.mkdir()
    child = make_child()
    pool = open_pd(child, route, folder)
    address = child.tell("pd.address")
    try:
        # What only a first item needs, as a group of `collective`, may take longer than the delay.
        do(child, "pd.arrive('before', 'before', 30)")
        encode.order("t-before", "before", address, (30, WIDTH))
        encode.put_out("before", "output('before', 30)")
        do(child, "pd.step_until(lambda: 'before' in pd.placed)")
        do(child, "pd.arrive('r', 'cat', 10)")
        encode.order("t-r", "cat", address, (10, WIDTH))
        encode.put_out("cat", "output('cat', 10)", LATE_US // 4)
        do(child, "pd.step_until(lambda: pd.granted('t-r'))")
        encode.wait_until_writing()
    finally:
        child.kill()
        for left in SHM_FOLDER.glob(f"{pool}*"):
            left.unlink()
    with within(life_s + LEASE_S):
        encode.wait_until_ended("t-r")
    told = encode.said()
    if route.path == "ipc":  # The memory lives as long as somebody has it open; nobody answers.
        assert f"not acknowledged by {address} in {life_s} s" in told
    else:
        assert "lost rank 0" in told or "is gone" in told
    assert_serves(encode, pd)


THREE = {"ASCEND_SIM_DEVICES": "3"}


def test_second_rank_places_an_item_written_by_a_third_device(
    route: Route,
    make_encode: Callable[..., Encode],
    make_child: Callable[..., Child],
    tmp_path: Path,
) -> None:
    encode, first, second = make_encode(**THREE), make_child(**THREE), make_child(**THREE)
    pool = open_pd(first, route, tmp_path)
    do(first, "pd.step = pd.shell.take_in")
    do(first, "pd.arrive('r', 'cat', 300)")
    encode.order("t-r", "cat", first.tell("pd.address"), (300, WIDTH))
    encode.put_out("cat", "output('cat', 300)")
    do(first, "pd.step_until(lambda: pd.shell.orders._placements)")
    do(first, "orders = pd.shell.orders.take_orders([], computes=True)")

    do(second, "from tests.kit.encode_side import output")
    do(second, "from epd_portable.config.instance import InstanceConfig")
    do(second, "from epd_portable.transfer.copies import DeviceCopies")
    do(second, "from epd_portable.transfer.worker_endpoint import WorkerEndpoint")
    do(second, "from epd_portable.items.placer import Placement, Placer, WorkerOrders")
    do(second, "from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec")
    do(second, "npu.set_device(2); copies = DeviceCopies(npu, 2)")
    do(
        second,
        f"config = InstanceConfig(instance='pd', platform='npu', path={route.path!r}, "
        f"pool={pool!r})",
    )
    do(second, "end = WorkerEndpoint(config, copies, rank=1)")
    do(second, "cache = {}")
    do(second, f"Placer(copies, end).carry_out({first.tell('orders')}, cache)")
    assert second.tell("str(cache['cat'].device)") == "npu:2"
    assert second.tell("torch.equal(cache['cat'].cpu(), output('cat', 300))") == "True"

    do(first, "pd.placer.carry_out(orders, pd.encoder_cache); pd.shell.step_done()")
    assert first.tell("str(pd.encoder_cache['cat'].device)") == "npu:1"
    assert first.tell("torch.equal(pd.encoder_cache['cat'].cpu(), output('cat', 300))") == ("True")
    do(second, "end.close()")
    do(first, "pd.close()")
