"""The encode worker's thread with real sockets, and what may go wrong around it."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode import writers as writers_module
from epd_portable.encode.producer import ProducerSession
from epd_portable.encode.sender import Sender
from epd_portable.errors import PlatformError, TransportError
from epd_portable.transfer.control import ControlClients
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.paths.mapped import ShmWriter
from tests.contract.pairs import Pair, Route
from tests.held_device import HeldPlatform
from tests.keyring import secret_file
from tests.kit.encode_side import (
    FINGERPRINT,
    LEASE_S,
    CountedSender,
    make_sender,
    order,
    output,
)
from tests.kit.ends import DEADLINE_S, PrefillSide
from tests.unit.items.harness import counted
from tests.waiting import until

pytestmark = pytest.mark.parametrize(
    "route", [Route("shm", Pair("cpu", "cpu"))], ids=str, indirect=True
)


@pytest.fixture
def pd(make_pd: Callable[..., PrefillSide]) -> PrefillSide:
    return make_pd()


def begin(sender: CountedSender, pd: PrefillSide, request: str = "r", name: str = "cat") -> None:
    """Let a request arrive, and its item be put out and sent by ``t-<request>``."""
    pd.arrive(request, name, 10)
    sender.submit(order(f"t-{request}", name, pd.address, 10), output(name, 10))


def ended(sender: CountedSender, pd: PrefillSide, *transfer_ids: str) -> None:
    """Step until exactly these transfers have ended; nothing is kept for them then."""
    seen: list[str] = []

    def all_seen() -> bool:
        seen.extend(sender.progress.take_ended())
        return set(transfer_ids) <= set(seen)

    pd.step_until(all_seen)
    pd.step()  # Places what has landed at the end of the last one.
    assert sorted(seen) == sorted(transfer_ids)


def assert_nothing_is_kept(sender: CountedSender) -> None:
    until(lambda: not sender.in_flight)


def threads_of_senders() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "epd-sender"]


def test_an_output_is_kept_until_its_transfers_end(sender: CountedSender, pd: PrefillSide) -> None:
    begin(sender, pd)
    ended(sender, pd, "t-r")
    assert pd.placed == ["cat"]
    counts = counted(sender.metrics.registry)
    assert counts["epd_encode_transfers_total{source=cache}"] == 1
    assert counts["epd_encode_transfers_ended_total{result=settled}"] == 1
    assert counts["epd_encode_sent_bytes_total{path=shm}"] == output("cat", 10).nbytes
    begin(sender, pd, "late")
    ended(sender, pd, "t-late")
    sender.output_ready("cat", output("cat", 10))
    assert_nothing_is_kept(sender)


def test_reset_fails_transfers_and_reports_none(sender: CountedSender, pd: PrefillSide) -> None:
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 10), None)
    sender.reset()
    pd.step_until(lambda: not sender.in_flight)
    sender.output_ready("cat", output("cat", 10))
    assert (sender.progress.take_ended(), pd.placed) == (set(), [])


def test_bad_addresses_harm_none(make_pd: Callable[..., PrefillSide], path: str) -> None:
    pd, sender = make_pd(), make_sender(path, wait_timeout_s=5.0)
    addresses = ("", "nonsense", "tcp://:x", "http://a:1", "\ud800")
    for number, address in enumerate(addresses):
        sender.submit(order(f"t-{number}", "dog", address, 10), output("dog", 10))
    begin(sender, pd)
    ended(sender, pd, "t-r", *(f"t-{number}" for number in range(len(addresses))))
    assert pd.placed == ["cat"]
    assert_nothing_is_kept(sender)
    sender.close()


@pytest.mark.parametrize(
    ("put_out", "what"),
    [
        (output("cat", 9), "(9, 64) float32"),
        (output("cat", 11), "(11, 64) float32"),
        (output("cat", 10).view(20, 32), "(20, 32) float32"),
        (output("cat", 20).bfloat16(), "(20, 64) bfloat16"),
    ],
    ids=["shorter", "longer", "another width", "as many bytes"],
)
def test_output_unlike_its_announcement_is_refused(
    sender: CountedSender,
    pd: PrefillSide,
    caplog: pytest.LogCaptureFixture,
    put_out: torch.Tensor,
    what: str,
) -> None:
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 10), put_out)
    ended(sender, pd, "t-r")
    assert pd.placed == []
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    assert pd.prefill.may_schedule("r", 1)
    why = f"encoder put out {what}, announced was (10, 64) float32"
    for end in ("transfer t-r ended: ", "item cat by transfer t-r: "):
        assert f"{end}{why}" in caplog.text


def test_unexpected_item_is_reported_at_both_ends(
    sender: CountedSender, pd: PrefillSide, caplog: pytest.LogCaptureFixture
) -> None:
    pd.arrive("r", "cat", 10)
    sender.submit(order("t-r", "cat", pd.address, 9), output("cat", 9))
    ended(sender, pd, "t-r")
    assert not pd.prefill.may_schedule("r", 1), "another encoder may have it as expected"
    told = [text for text in caplog.messages if "process this item differently" in text]
    assert len(told) == 2, caplog.text


def test_a_missing_copy_is_encoded_by_the_consumer(sender: CountedSender, pd: PrefillSide) -> None:
    sender.submit(order("t-r", "cat", pd.address, 10), None, restored=True, missing=True)
    pd.arrive("r", "cat", 10)
    ended(sender, pd, "t-r")
    assert pd.placed == []
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    assert pd.prefill.may_schedule("r", 1)
    assert_nothing_is_kept(sender)


@pytest.mark.parametrize("error", [TransportError("broken path"), RuntimeError("a bug")])
def test_a_write_that_raises_ends_its_transfer_and_no_other(
    sender: CountedSender, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    pd.arrive("r", "cat", 10)
    with monkeypatch.context() as patch:
        patch.setattr(ShmWriter, "write", fail)
        sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 10))
        ended(sender, pd, "t-r")
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    begin(sender, pd, "s", "dog")
    ended(sender, pd, "t-s")
    assert pd.placed == ["dog"]
    seen = counted(sender.metrics.registry)
    assert seen["epd_encode_write_failures_total{path=shm}"] == 1
    assert seen["epd_encode_write_seconds_count{path=shm}"] == 1
    assert_nothing_is_kept(sender)


def test_closing_lets_transfers_end(path: str, make_pd: Callable[..., PrefillSide]) -> None:
    pd, sender = make_pd(), make_sender(path)
    begin(sender, pd)
    closing = threading.Thread(target=sender.close, args=(DEADLINE_S,))
    closing.start()
    pd.step_until(lambda: not closing.is_alive())
    pd.step()
    assert pd.placed == ["cat"]
    assert sender.progress.take_ended() == {"t-r"}


def test_a_rest_ends_with_a_transfer_or_its_time(sender: CountedSender, pd: PrefillSide) -> None:
    sender.progress.rest(0.001)
    begin(sender, pd)
    resting = threading.Thread(target=sender.progress.rest, args=(DEADLINE_S,))
    resting.start()
    pd.step_until(lambda: not resting.is_alive())
    assert sender.progress.take_ended() == {"t-r"}
    begin_s = time.monotonic()
    sender.progress.rest(0.01)
    assert time.monotonic() - begin_s >= 0.01, "that end was told already"


def of_device(path: str) -> tuple[HeldPlatform, Sender]:
    """A sender whose device computes when it is let."""
    config = InstanceConfig(
        instance="encode-0", platform="cpu", path=path, lease_s=LEASE_S, secret_file=secret_file()
    )
    device = HeldPlatform()
    return device, Sender(config, FINGERPRINT, DeviceCopies(device))


def test_two_steps_are_queued_and_reported_when_computed(path: str) -> None:
    device, sender = of_device(path)
    sender.progress.step_queued(1)
    assert sender.progress.take_computed() is None
    queueing = threading.Thread(target=sender.progress.step_queued, args=(2,))
    queueing.start()
    queueing.join(0.1)
    assert queueing.is_alive(), "the device would get one step after the other"
    resting = threading.Thread(target=sender.progress.rest, args=(DEADLINE_S,))
    resting.start()
    device.let(1)
    for thread in (queueing, resting):
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert (sender.progress.take_computed(), sender.progress.take_computed()) == (1, None)
    device.let()
    sender.progress.rest(DEADLINE_S)
    assert sender.progress.take_computed() == 2
    sender.close()


def test_a_device_that_fails_ends_whoever_waits_for_its_steps(path: str) -> None:
    device, sender = of_device(path)
    sender.progress.step_queued(1)
    waiting: list[BaseException] = []

    def queue() -> None:
        try:
            sender.progress.step_queued(2)
        except BaseException as error:
            waiting.append(error)

    queueing = threading.Thread(target=queue)
    queueing.start()
    device.fail()
    queueing.join(DEADLINE_S)
    assert [type(error) for error in waiting] == [PlatformError]
    with pytest.raises(PlatformError, match="it is broken"):
        sender.progress.take_computed()
    sender.close()


def test_a_sender_that_stops_can_be_woken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the sender may close the channel while another thread wakes it."""
    sender = make_sender(path)
    wake = ControlClients.wake

    def late(control: ControlClients) -> None:
        until(lambda: not threads_of_senders())
        wake(control)

    monkeypatch.setattr(ControlClients, "wake", late)
    sender.close()
    sender.close()


def test_short_copy_runs_on_the_sending_thread(
    sender: CountedSender, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers_module, "CHUNK_BYTES", output("cat", 10).nbytes)
    writers: list[str] = []
    real = ShmWriter.write

    def noted(*args: Any, **kwargs: Any) -> None:
        writers.append(threading.current_thread().name)
        real(*args, **kwargs)

    monkeypatch.setattr(ShmWriter, "write", noted)
    for name, tokens in (("cat", 10), ("dog", 11)):
        pd.arrive(name, name, tokens)
        sender.submit(order(f"t-{name}", name, pd.address, tokens), output(name, tokens))
        ended(sender, pd, f"t-{name}")
    assert pd.placed == ["cat", "dog"]
    assert [name.rstrip("0123456789") for name in writers] == ["epd-sender", "epd-writer-"]


@pytest.fixture
def stuck(
    sender: CountedSender, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """A write that is under way, far beyond its lease, until the event is set."""
    monkeypatch.setattr(writers_module, "CHUNK_BYTES", 0)
    let_go, begun = threading.Event(), threading.Event()
    real = ShmWriter.write

    def stuck(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert let_go.wait(DEADLINE_S)
        real(*args, **kwargs)

    monkeypatch.setattr(ShmWriter, "write", stuck)
    begin(sender, pd)
    pd.step_until(begun.is_set)
    yield let_go
    let_go.set()


def test_close_leaves_a_stuck_write_and_its_memory_alone(
    sender: CountedSender, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers_module, "CLOSE_S", 0.1)
    closed: list[bool] = []
    monkeypatch.setattr(ShmWriter, "close", lambda _: closed.append(True))
    sender.close()
    assert not threads_of_senders()
    assert closed == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ended_sender_writes_no_more(
    path: str, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(path)
    granted = threading.Event()
    receive = ProducerSession.receive

    def last(session: ProducerSession, *given: Any) -> None:
        receive(session, *given)
        granted.set()
        raise SystemExit(1)

    monkeypatch.setattr(ProducerSession, "receive", last)
    begin(sender, pd)
    pd.step_until(granted.is_set)
    until(lambda: not threads_of_senders())
    sender.output_ready("cat", output("cat", 10))
    sender.close()
    pd.step()
    assert pd.placed == []


def test_unexpected_error_ends_its_transfer_and_is_logged_once(
    sender: CountedSender,
    pd: PrefillSide,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = ControlClients.send

    def short_of_files(control: ControlClients, address: str, message: Any) -> None:
        if address != pd.address:
            raise zmq.ZMQError(errno.EMFILE)
        real(control, address, message)

    monkeypatch.setattr(ControlClients, "send", short_of_files)
    pd.arrive("r", "cat", 10)
    with caplog.at_level(logging.WARNING):
        for name in ("t-1", "t-2"):
            sender.submit(order(name, "dog", "tcp://127.0.0.1:9", 10), output("dog", 10))
        sender.submit(order("t-r", "cat", pd.address, 10), output("cat", 10))
        ended(sender, pd, "t-1", "t-2", "t-r")
    assert pd.placed == ["cat"]
    for name in ("t-1", "t-2"):
        assert f"transfer {name} ended: Too many open files" in caplog.text
    assert [record.message for record in caplog.records if "ulimit -n" in record.message] == [
        "the sender continues after ZMQError('Too many open files'), without the transfer "
        "concerned; raise the limit of open files (ulimit -n)"
    ]
    assert_nothing_is_kept(sender)


def test_an_error_ends_no_other_transfer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = make_sender(path, wait_timeout_s=0.2)

    def fail(result: str) -> None:
        raise ValueError("no such label")

    monkeypatch.setattr(sender.metrics.ended, "labels", fail)
    for name in ("t-1", "t-2"):
        sender.submit(order(name, "cat", "tcp://127.0.0.1:9", 10), None)
    seen: set[str] = set()
    until(lambda: seen.update(sender.progress.take_ended()) or seen == {"t-1", "t-2"})
    sender.close()


@pytest.mark.parametrize("call", ["receive", "poll"])
def test_a_turn_that_fails_is_followed_by_others(
    sender: CountedSender, pd: PrefillSide, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    owner = ControlClients if call == "receive" else ProducerSession
    real = getattr(owner, call)
    failures = iter(range(3))

    def sometimes(*args: object) -> object:
        if next(failures, None) is not None:
            raise zmq.ZMQError(errno.EMFILE)
        return real(*args)

    monkeypatch.setattr(owner, call, sometimes)
    begin(sender, pd)
    ended(sender, pd, "t-r")
    assert next(failures, None) is None
    assert pd.placed == ["cat"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit(1), zmq.ZMQError(errno.ENOTSOCK)])
def test_transfer_is_refused_after_the_thread_has_ended(
    path: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An error that is no `Exception` ends the sender at once, another once transfers are late."""
    sender = make_sender(path, wait_timeout_s=0.2)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(ProducerSession, "poll", fail)
    sender.submit(order("t-1", "cat", "tcp://127.0.0.1:9", 10), None)
    until(lambda: not threads_of_senders())
    with pytest.raises(TransportError, match=r"t-2: the thread epd-sender ended .* restart it"):
        sender.submit(order("t-2", "cat", "tcp://127.0.0.1:9", 10), None)
    sender.close()
