"""Frames of a stranger to the receiver of `collective`: it stays alive and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch
from msgspec.msgpack import encode

from epd_portable.errors import (
    LeaseExpiredError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from epd_portable.platforms import registry
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.paths import collective
from epd_portable.transfer.paths.base import RevokedFence
from epd_portable.transfer.paths.collective import (
    MAX_FRAME_BYTES,
    PRODUCER_RANK,
    Answer,
    CollectiveReceiver,
    CollectiveWriter,
    Join,
    Put,
)
from epd_portable.wire.descriptors import SlotDescriptor
from tests.keyring import keys
from tests.receiving import receiving_end, slot_write
from tests.unit.transfer.spies import SpyEvent

HOST = "127.0.0.1"
NBYTES = 4096
SLOT = SlotDescriptor(pool="pool", offset=0, nbytes=64, generation=1)
FILL = 0xA5
DEADLINE_S = 20.0


class Memory:
    nbytes = NBYTES

    def __init__(self) -> None:
        self.bytes = torch.full((NBYTES,), FILL, dtype=torch.uint8)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        if offset < 0 or nbytes <= 0 or offset + nbytes > NBYTES:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside")
        return self.bytes[offset : offset + nbytes]


class Consumer:
    """A receiver on CPU with its memory and its fence."""

    def __init__(self) -> None:
        self.memory, self.fence = Memory(), RevokedFence()
        self.copies = DeviceCopies(registry.get("cpu"))
        self.receiver = CollectiveReceiver(
            receiving_end(self.memory, copies=self.copies, fence=self.fence)
        )

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.receiver.address.rpartition(":")
        return host, int(port)

    @property
    def untouched(self) -> bool:
        return bool(self.memory.bytes.eq(FILL).all())

    def assert_serves(self) -> None:
        """Another producer joins and writes an item."""
        writer = CollectiveWriter(self.copies, keys())
        slot = SlotDescriptor(pool="pool", offset=128, nbytes=256, generation=99)
        self.write(writer, slot, 7)
        writer.close()
        assert self.memory.tensor(128, 256).eq(7).all()

    def write(self, writer: CollectiveWriter, slot: SlotDescriptor, value: int) -> None:
        src = torch.full((slot.nbytes,), value, dtype=torch.uint8)
        writer.write(slot_write(self.copies, src, slot, self.receiver.address))


def until(condition: Callable[[], bool], otherwise: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise()
        gc.collect()
        time.sleep(0.01)


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # Of the listing itself.
    return found


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Let torch open what it keeps for the life of the process."""
    made = Consumer()
    made.assert_serves()
    made.receiver.close()


@pytest.fixture
def _texts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log texts: pytest keeps records, and with their errors the sockets of where they rose."""

    def as_text(record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage(), ()
        return True

    monkeypatch.setattr(collective.logger, "filters", [as_text])


@pytest.fixture
def consumer(_texts_only: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Consumer]:
    """A receiver that leaves no thread and no descriptor, whatever was sent to it."""
    # A close that waits for a producer would not end.
    monkeypatch.setattr(collective, "_STOP_GRACE_S", 3600.0)
    monkeypatch.setattr(collective, "FRAME_PAUSE_S", 1)
    threads, files = set(threading.enumerate()), len(descriptors())
    made = Consumer()
    yield made
    made.receiver.close()
    until(
        lambda: set(threading.enumerate()) <= threads, lambda: set(threading.enumerate()) - threads
    )
    del made
    until(lambda: len(descriptors()) <= files, lambda: (files, descriptors()))


@contextlib.contextmanager
def stranger(consumer: Consumer) -> Iterator[socket.socket]:
    with socket.create_connection(consumer.address, DEADLINE_S) as connected:
        yield connected


@contextlib.contextmanager
def producer(consumer: Consumer) -> Iterator[tuple[Connection, CollectiveGroup]]:
    """Yield a producer that has joined, and whose frames are the test's."""
    connection = collective.frames_over(socket.create_connection(consumer.address, DEADLINE_S))
    connection.send_bytes(encode(Join("group")))
    where = Rendezvous(host=HOST, port=hear(connection).port, name="group", rank=PRODUCER_RANK)
    group = consumer.copies.platform.new_group(where, index=0, timeout_s=DEADLINE_S)
    try:
        yield connection, group
    finally:
        group.close()
        connection.close()


def hear(connection: Connection) -> Answer:
    assert connection.poll(DEADLINE_S), "the receiver does not answer"
    return msgspec.msgpack.decode(connection.recv_bytes(), type=Answer)


def assert_hung_up(connected: socket.socket) -> None:
    connected.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionResetError):  # It had not read all that was sent.
        assert connected.recv(1) == b""


def frame(payload: bytes) -> bytes:
    return struct.pack("!i", len(payload)) + payload


NO_REQUESTS = {
    "garbage": (frame(b"garbage"), "MessagePack data is malformed|Expected|trailing"),
    "nothing": (frame(b""), "truncated"),
    # Its group would send words that none is expected for, which ends the process.
    "a join of an earlier version": (frame(encode({"type": "join 2", "name": "x"})), "'join 2'"),
    "another request": (frame(encode({"type": "leave"})), "Invalid value 'leave'"),
    "more than one": (frame(encode(Join("x")) + b"more"), "trailing"),
    "cut short": (frame(encode(Join("x"))[:-1]), "truncated"),
    "too long a frame": (struct.pack("!i", MAX_FRAME_BYTES + 1), "bad message length"),
    "far too long a frame": (struct.pack("!iQ", -1, 1 << 62), "bad message length"),
    "a negative length": (struct.pack("!i", -7), "truncated"),
    "a browser": (b"GET / HTTP/1.1\r\n\r\n", "bad message length"),
    "put before join": (frame(encode(Put(SLOT, 1.0))), "a producer joins once, and then puts"),
}


@pytest.mark.parametrize("kind", NO_REQUESTS)
def test_invalid_request_ends_its_connection(
    consumer: Consumer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    sent, why = NO_REQUESTS[kind]
    with caplog.at_level(logging.WARNING), stranger(consumer) as connected:
        connected.sendall(sent)
        assert_hung_up(connected)
    (record,) = caplog.records
    assert record.message.startswith("receiving by a group ended: ")
    assert any(part in record.message for part in why.split("|")), record.message
    assert consumer.untouched
    consumer.assert_serves()


@pytest.mark.parametrize("sent", [b"\0\0", frame(encode(Join("group")))[:-3]], ids=["4", "rest"])
def test_half_a_frame_ends_its_connection_alone(consumer: Consumer, sent: bytes) -> None:
    with stranger(consumer) as connected:
        connected.sendall(sent)
        consumer.assert_serves()
        assert_hung_up(connected)


def test_receiver_closes_at_once_with_silent_producers(consumer: Consumer) -> None:
    with stranger(consumer) as first, stranger(consumer) as second:
        consumer.assert_serves()
        consumer.receiver.close()
        assert_hung_up(first)
        assert_hung_up(second)


def test_without_descriptors_all_wait(consumer: Consumer, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING), socket.socket() as connected:
        resource.setrlimit(resource.RLIMIT_NOFILE, (connected.fileno() + 1, hard))
        try:
            connected.connect(consumer.address)
            until(lambda: bool(caplog.records), lambda: "nothing was logged")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in caplog.records[0].message
        connected.sendall(frame(b""))
        assert_hung_up(connected)
    consumer.assert_serves()


def test_without_threads_the_next_ones_are_served(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with caplog.at_level(logging.WARNING):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            with stranger(consumer) as connected:
                assert_hung_up(connected)
        consumer.assert_serves()  # So it has said before what came before.
    assert "can't start new thread" in caplog.text


def test_connection_without_join_holds_no_thread(
    consumer: Consumer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(collective, "JOIN_TIMEOUT_S", 0.1)
        with stranger(consumer) as connected:
            assert_hung_up(connected)
    assert "did not join" in caplog.text
    consumer.assert_serves()


@pytest.mark.parametrize("seconds", [1e300, float("inf"), 0.0, -1.0, float("nan")])
def test_item_is_refused_without_time_and_served_without_limit(
    consumer: Consumer, seconds: float
) -> None:
    with producer(consumer) as (connection, group):
        if not seconds > 0:
            connection.send_bytes(encode(Put(SLOT, seconds)))
            assert f"{seconds} s to write an item" in hear(connection).problem
        put(connection, group, seconds=seconds if seconds > 0 else DEADLINE_S)


def test_a_second_join_ends_the_pair(consumer: Consumer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), producer(consumer) as (connection, _):
        connection.send_bytes(encode(Join("another")))
        assert connection.poll(DEADLINE_S)
        with pytest.raises(EOFError):
            connection.recv_bytes()
    assert "a producer joins once" in caplog.text
    consumer.assert_serves()


def test_an_item_that_is_not_sent_is_late(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), producer(consumer) as (connection, _):
        connection.send_bytes(encode(Put(SLOT, 0.5)))
        assert hear(connection).problem == ""
        consumer.assert_serves()
        with pytest.raises(EOFError):
            assert connection.poll(DEADLINE_S)
            connection.recv_bytes()
    assert "within 0.5 s" in caplog.text
    assert consumer.memory.tensor(0, 64).eq(FILL).all()


def test_an_item_without_room_is_refused(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    writer = CollectiveWriter(consumer.copies, keys())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(LeaseExpiredError) as caught:
            consumer.write(writer, SLOT, 1)
    for part in ("64 bytes on cpu", "free: lower gpu_memory_utilization", "transfer.path"):
        assert part in str(caught.value)
    assert consumer.untouched
    consumer.write(writer, SLOT, 3)
    writer.close()


ANSWERS = {
    "half a length": (b"\0\0", PeerLostError),
    "half a frame": (frame(encode(Answer(port=9)))[:-1], PeerLostError),
    "too long": (struct.pack("!i", MAX_FRAME_BYTES + 1), PeerLostError),
    "nothing listens at its port": (frame(encode(Answer(port=9))), PeerLostError),
    "nothing": (b"", TransportError),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_of_nonsense_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "FRAME_PAUSE_S", 1)
    answer, error = ANSWERS[kind]
    copies = DeviceCopies(registry.get("cpu"))
    writer = CollectiveWriter(copies, keys())
    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=_answer, args=(server, answer), daemon=True).start()
        with pytest.raises(error):
            address = f"{HOST}:{server.getsockname()[1]}"
            writer.write(slot_write(copies, torch.ones(64, dtype=torch.uint8), SLOT, address, 0.5))
    writer.close()


def _answer(server: socket.socket, answer: bytes) -> None:
    connected, _ = server.accept()
    with connected:
        connected.sendall(answer)
        while connected.recv(MAX_FRAME_BYTES):
            pass


def put(
    connection: Connection,
    group: CollectiveGroup,
    slot: SlotDescriptor = SLOT,
    seconds: float = DEADLINE_S,
) -> None:
    """Write an item as a producer does."""
    connection.send_bytes(encode(Put(slot, seconds)))
    assert hear(connection).problem == ""
    group.send(torch.full((slot.nbytes,), 5, dtype=torch.uint8), DEADLINE_S)
    assert hear(connection).problem == ""


def test_an_item_is_put_when_computed(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    passed = iter([False, False, True])

    def look() -> bool:
        happened.append("looked")
        return next(passed)

    def put(*given: Any, **options: Any) -> Put:
        happened.append("told")
        return Put(*given, **options)

    monkeypatch.setattr(collective, "Put", put)
    writer = CollectiveWriter(consumer.copies, keys())
    src, address = torch.full((SLOT.nbytes,), 7, dtype=torch.uint8), consumer.receiver.address
    writer.write(slot_write(consumer.copies, src, SLOT, address, computed=SpyEvent(look)))
    writer.close()
    assert happened == ["looked", "looked", "looked", "told"]


def test_an_item_that_is_not_computed_holds_up_no_other(consumer: Consumer) -> None:
    writer = CollectiveWriter(consumer.copies, keys())
    src, never = torch.zeros(SLOT.nbytes, dtype=torch.uint8), SpyEvent(lambda: False)
    with pytest.raises(TransportTimeoutError, match="device work was not complete"):
        writer.write(slot_write(consumer.copies, src, SLOT, consumer.receiver.address, 0.05, never))
    consumer.write(writer, SLOT, 7)
    writer.close()
    assert consumer.memory.tensor(0, 64).eq(7).all()
