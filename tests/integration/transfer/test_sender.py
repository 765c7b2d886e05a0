"""The encode worker's thread with real sockets, and what may go wrong around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from epd_portable.connector.transport import Transport
from epd_portable.errors import TransportError
from epd_portable.runners.sender import _IDLE_POLL_S, Sender
from tests.contract.pairs import Pair, Route
from tests.integration.transfer.conftest import DEADLINE_S, PrefillSide
from tests.integration.transfer.encode_side import make_sender, order, output

pytestmark = pytest.mark.parametrize(
    "route", [Route("shm", Pair("cpu", "cpu"))], ids=str, indirect=True
)


@pytest.fixture
def sender(path: str) -> Iterator[Sender]:
    made = make_sender(path)
    yield made
    made.close()


@pytest.fixture
def pd(make_pd: Callable[..., PrefillSide]) -> PrefillSide:
    return make_pd()


def ended(sender: Sender, pd: PrefillSide, *transfer_ids: str) -> None:
    """Step until exactly these transfers have ended; nothing is kept for them then."""
    seen: list[str] = []

    def all_seen() -> bool:
        seen.extend(sender.take_ended())
        return set(transfer_ids) <= set(seen)

    pd.step_until(all_seen)
    pd.step()  # Places what has landed at the end of the last one.
    assert sorted(seen) == sorted(transfer_ids)


def assert_nothing_is_kept(sender: Sender) -> None:
    assert (sender._orders, sender._outputs, dict(sender._users)) == ({}, {}, {})


def test_an_output_is_kept_until_every_transfer_of_it_has_ended(
    sender: Sender, pd: PrefillSide
) -> None:
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 10))
    ended(sender, pd, "t-r")
    assert pd.placed == ["cat"]
    sender.submit(order("t-late", "cat", pd.address, 10), output("cat", 10))
    assert "cat" in sender._outputs
    pd.receiver._session.decline("t-late")
    ended(sender, pd, "t-late")
    assert_nothing_is_kept(sender)


def test_an_output_that_nobody_ordered_is_not_kept(sender: Sender) -> None:
    sender.output_ready("cat", output("cat", 10))
    assert_nothing_is_kept(sender)


def test_an_order_given_twice_is_one_transfer(sender: Sender, pd: PrefillSide) -> None:
    pd.arrive("r", "cat", 10)
    for _ in range(3):
        sender.submit(order("t-r", "cat", pd.address, 10), None)
    sender.output_ready("cat", output("cat", 10))
    ended(sender, pd, "t-r")
    assert_nothing_is_kept(sender)
    pd.arrive("s", "dog", 10)
    sender.submit(order("t-s", "dog", pd.address, 10), output("dog", 10))
    ended(sender, pd, "t-s")
    assert pd.placed == ["cat", "dog"]


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://:x", "http://a:1", "\ud800"])
def test_a_consumer_s_address_that_is_none_harms_no_other_transfer(
    make_pd: Callable[..., PrefillSide], path: str, address: str
) -> None:
    pd, sender = make_pd(), make_sender(path, wait_timeout_s=1.5)
    sender.submit(order("t-bad", "dog", address, 10), output("dog", 10))
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 10))
    ended(sender, pd, "t-r", "t-bad")
    assert pd.placed == ["cat"]
    assert_nothing_is_kept(sender)
    sender.close()


def test_a_consumer_that_is_not_there_ends_its_transfer_at_the_deadline(
    make_pd: Callable[..., PrefillSide], path: str
) -> None:
    pd, sender = make_pd(), make_sender(path, wait_timeout_s=1.0)
    sender.submit(order("t", "cat", "tcp://127.0.0.1:9", 10), output("cat", 10))
    ended(sender, pd, "t")
    assert_nothing_is_kept(sender)
    sender.close()


def test_an_output_of_another_shape_than_announced_is_refused_and_encoded_by_the_consumer(
    sender: Sender, pd: PrefillSide
) -> None:
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 9))
    ended(sender, pd, "t-r")
    assert pd.placed == []
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    assert pd.receiver.may_schedule("r", 1)


@pytest.mark.parametrize("error", [TransportError("broken path"), RuntimeError("a bug")])
def test_a_write_that_raises_ends_its_transfer_and_no_other(
    sender: Sender, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    pd.arrive("r", "cat", 10)
    with monkeypatch.context() as patch:
        transport: Transport = sender._transport("shm")
        patch.setattr(transport, "write", fail)
        sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 10))
        ended(sender, pd, "t-r")
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    pd.arrive("s", "dog", 10)
    sender.submit(order("t-s", "dog", pd.address, 10), output("dog", 10))
    ended(sender, pd, "t-s")
    assert pd.placed == ["dog"]
    assert_nothing_is_kept(sender)


def test_a_request_that_ends_during_the_write_ends_the_transfer_after_it(
    sender: Sender, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = sender._transport("shm")
    real = transport.write

    def slow(*args: object, **kwargs: object) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while pd.requests and time.monotonic() < deadline_s:
            time.sleep(0.001)
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "write", slow)
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 10))
    pd.step_until(lambda: pd.free_bytes < pd.pool_bytes)
    pd.finish("r")
    ended(sender, pd, "t-r")
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    assert_nothing_is_kept(sender)
    assert pd.placed == []


def test_closing_ends_the_thread_while_transfers_are_under_way(path: str) -> None:
    sender = make_sender(path)
    sender.submit(order("t", "cat", "tcp://127.0.0.1:9", 10), None)
    sender.close()
    assert not sender._thread.is_alive()


def test_a_sender_that_stops_at_once_can_still_be_woken(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread saw the end, and closed the channel under whoever was waking it."""
    sender = make_sender(path)
    wake = sender._control.wake

    def late() -> None:
        sender._thread.join(2 * _IDLE_POLL_S)
        wake()

    monkeypatch.setattr(sender._control, "wake", late)
    sender.close()
    assert not sender._thread.is_alive()
    sender.close()
