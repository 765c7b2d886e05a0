"""The short way of *written* on one host: who takes it, who may, and what happens without it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from epd_portable.transfer import connections, control
from epd_portable.transfer.control import (
    ControlClients,
    ControlServer,
    DatagramInbox,
    DatagramOutbox,
)
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.wire.codec import MAX_MESSAGE_BYTES, encode
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import AnyMessage, Grant, Later, Written
from tests.keyring import keys
from tests.receiving import pool_name
from tests.waiting import until

DEADLINE_S = 20.0
WRITTEN = Written(transfer_id="t", attempt=1, generation=7)


def grant(pool: str, path: str = "shm") -> Grant:
    slot = SlotDescriptor(pool=pool, offset=0, nbytes=1, generation=7)
    return Grant(transfer_id="t", attempt=1, slot=slot, path=path, address="", lease_s=1.0)


class Consumer(ControlServer):
    """A control server beside a pool."""

    def __init__(self, pool: str, address: str = "tcp://127.0.0.1:*") -> None:
        super().__init__(address, "server", keys(), pool)
        self.pool = pool


@pytest.fixture
def pool() -> str:
    return pool_name()


@pytest.fixture
def consumer(pool: str) -> Iterator[Consumer]:
    made = Consumer(pool)
    yield made
    made.close()


def meet(clients: ControlClients, consumer: Consumer, path: str = "shm") -> None:
    """Let the producer hear of a grant."""
    clients.send(consumer.address, Later(transfer_id="hello"))
    until(consumer.receive)
    consumer.send(b"client", grant(consumer.pool, path))
    until(clients.receive)


def by_datagram(clients: ControlClients, consumer: Consumer, message: AnyMessage) -> bool:
    consumer._listener.log_refusals()
    with mock.patch.object(control, "receive_parts", side_effect=control.receive_parts) as zmq:
        clients.send(consumer.address, message)
        assert until(consumer.receive) == [(b"client", message)]
    return not zmq.called


@pytest.mark.parametrize(("path", "short"), [("shm", True), ("ipc", True), ("tcp", False)])
def test_written_takes_the_datagram_after_a_grant_on_the_host(
    clients: ControlClients, consumer: Consumer, path: str, short: bool
) -> None:
    meet(clients, consumer, path)
    assert by_datagram(clients, consumer, WRITTEN) is short
    assert not by_datagram(clients, consumer, Later(transfer_id="t"))


def test_turn_reads_zmq_and_datagrams_and_leaves_a_floods_rest(
    clients: ControlClients, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_AT_ONCE", 3)
    meet(clients, consumer)
    for _ in range(4):
        clients.send(consumer.address, WRITTEN)
    clients.send(consumer.address, Later(transfer_id="u"))
    pieces = []
    while sum(pieces) < 5:
        consumer.wait(DEADLINE_S)
        pieces.append(len(consumer.receive()))
    assert max(pieces) <= 3


def test_a_restarted_consumer_is_reached_again(clients: ControlClients, pool: str) -> None:
    first = Consumer(pool)
    address = first.address
    meet(clients, first)
    first.close()
    second = Consumer(pool, address)
    try:
        clients.send(address, WRITTEN)
        assert until(second.receive) == [(b"client", WRITTEN)]
        assert address not in clients._near
        second.send(b"client", grant(pool))
        until(clients.receive)
        assert by_datagram(clients, second, WRITTEN)
    finally:
        second.close()


def test_message_larger_than_a_datagram_goes_by_zmq(
    clients: ControlClients, consumer: Consumer
) -> None:
    meet(clients, consumer)
    # More than a socket holds, and not more than ZMQ's own queue takes of the rest.
    many = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 500
    for number in range(many):
        clients.send(consumer.address, Written(transfer_id=str(number), generation=1))
    found: set[str] = set()
    deadline_s = time.monotonic() + DEADLINE_S
    with mock.patch.object(control, "receive_parts", side_effect=control.receive_parts) as zmq:
        while len(found) < many and time.monotonic() < deadline_s:
            found |= {message.transfer_id for _, message in consumer.receive()}
            consumer.wait(0.01)
    assert zmq.called
    assert len(found) == many
    assert by_datagram(clients, consumer, WRITTEN), "there is room again"


def test_nonsense_is_dropped_and_the_next_one_arrives(
    consumer: Consumer, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = encode(WRITTEN, session="client")
    sender = DatagramOutbox(pool)
    for data in (b"", b"garbage", good[:-1], bytes(MAX_MESSAGE_BYTES * 2), good):
        sender.send(data)
    sender.close()
    assert until(consumer.receive) == [(b"client", WRITTEN)]
    assert len([each for each in caplog.records if "dropped" in each.msg]) == 4


def test_datagram_socket_is_private_and_removed(pool: str) -> None:
    before = os.umask(0)
    try:
        inbox = DatagramInbox(pool)
    finally:
        os.umask(before)
    (file,) = SHM_FOLDER.glob(f"{pool}*")
    assert file.is_socket()
    assert file.stat().st_mode & 0o777 == 0o600
    inbox.close()
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []


def _link(path: Path) -> None:
    path.symlink_to("/nowhere")


def _file(path: Path) -> None:
    path.touch(0o600)


def _open_to_others(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(path))
    path.chmod(0o666)


@pytest.mark.parametrize("make", [_link, _file, _open_to_others])
def test_only_an_inbox_of_this_user_is_sent_to(pool: str, make: Callable[[Path], None]) -> None:
    path = SHM_FOLDER / f"{pool}.control"
    make(path)
    try:
        with pytest.raises(PermissionError, match="no other user may open"):
            DatagramOutbox(pool)
        DatagramInbox(pool).close()  # What is left under the name is replaced.
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_long_name_is_shortened_equally_at_both_ends(pool: str) -> None:
    name = pool.ljust(200, "x")
    inbox = DatagramInbox(name)
    sender = DatagramOutbox(name)
    sender.send(b"here")
    assert inbox.receive() == b"here"
    assert inbox.receive() is None
    sender.close()
    inbox.close()
    assert list(SHM_FOLDER.glob(f"{pool[:40]}*")) == []


def test_a_consumer_that_left_costs_no_socket(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONSUMERS", 1)
    consumers = [Consumer(f"{pool}-{number}") for number in range(3)]
    clients = ControlClients("client", keys())
    opened = []
    try:
        for each in consumers:
            meet(clients, each)
            assert list(clients._near) == [each.address]
            opened += clients._near.values()
    finally:
        clients.close()
        for each in consumers:
            each.close()
    assert [each._socket.fileno() for each in opened] == [-1] * 3
