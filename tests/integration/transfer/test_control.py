"""The control channel's sockets: what a holder of the secret may send, peers that come and go."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.errors import TransportError
from epd_portable.transfer import connections, control
from epd_portable.transfer.control import ControlClients, ControlServer
from epd_portable.transfer.curve import OVERHEAD_BYTES, receive_parts
from epd_portable.transfer.endpoint import ConsumerEndpoint
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.transfer.stores.loader import IDENTITY
from epd_portable.wire.codec import MAX_MESSAGE_BYTES, encode
from epd_portable.wire.messages import Abort, Announce, AnyMessage, Later, Nack, NackCode
from tests.keyring import keys, secret_file
from tests.receiving import dealer, pool_name
from tests.unit.builders import SPEC, peer
from tests.waiting import until


def heard(clients: ControlClients, timeout_s: float = 0.1) -> list[tuple[str, AnyMessage]]:
    clients.wait(timeout_s)
    return clients.receive()


DEADLINE_S = 20.0


def test_nonsense_is_dropped(server: ControlServer, clients: ControlClients) -> None:
    good, nested = encode(Later(transfer_id="t"), session="s"), b"\x91" * MAX_MESSAGE_BYTES
    long = [b"\xc1" * (MAX_MESSAGE_BYTES // 2 + 1)] * 2
    with dealer(server.address) as peer:
        for frames in ([b""], [b"", b""], [b"garbage"], [good[:-1]], long, [nested], [good]):
            peer.send_multipart(frames)
        ((_, message),) = until(server.receive)
    assert message == Later(transfer_id="t")


def test_an_answer_may_be_as_long_as_the_limit_and_no_longer(
    server: ControlServer, clients: ControlClients, caplog: pytest.LogCaptureFixture
) -> None:
    clients.send(server.address, Later(transfer_id="t"))
    ((identity, _),) = until(server.receive)
    for nbytes in (MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + OVERHEAD_BYTES):
        server._socket.send_multipart([identity, bytes(nbytes)])
    end_s = time.monotonic() + DEADLINE_S
    while not caplog.records:
        assert time.monotonic() < end_s
        assert heard(clients) == []
    # Nothing comes of the one that is too long, either.
    assert heard(clients, 0.5) == []
    assert [record.getMessage()[-40:] for record in caplog.records if "dropped" in record.msg] != []
    assert len(caplog.records) == 1


def test_message_in_many_parts_is_copied_up_to_the_limit_only() -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as one,
        context.socket(zmq.PAIR) as other,
    ):
        one.bind("inproc://parts")
        other.connect("inproc://parts")
        for parts in ([b"a", b"b", b"c", b"d", b"e"], [b"next"]):
            other.send_multipart(parts)
        assert receive_parts(one, most=2) == [b"a", b"b", b"c"]
        assert receive_parts(one, most=2) == [b"next"]


def test_a_flood_that_nobody_reads_is_stopped_at_its_sender(server: ControlServer) -> None:
    large, most_bytes, sent = bytes(MAX_MESSAGE_BYTES), 64 << 20, 0
    slow = dealer(server.address, sndhwm=1, sndtimeo=1000)
    with slow as peer, contextlib.suppress(zmq.Again):
        while sent < 2 * most_bytes:
            peer.send(large)
            sent += len(large)
    assert 0 < sent < most_bytes


def test_a_long_message_ends_its_connection(server: ControlServer, clients: ControlClients) -> None:
    with dealer(server.address) as peer:
        with peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            peer.send(b"x" * (MAX_MESSAGE_BYTES + OVERHEAD_BYTES))
            assert monitor.poll(DEADLINE_S * 1000)
        clients.send(server.address, Later(transfer_id="t"))
        assert until(server.receive) == [(b"client", Later(transfer_id="t"))]


def test_a_peer_that_does_not_read_loses_messages(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(control, "_HIGH_WATER_MARK", 3)
    server, clients = map(request.getfixturevalue, ("server", "clients"))
    clients.send(server.address, Later(transfer_id="hello"))
    until(server.receive)
    # More than the buffers of the sockets take.
    many = 10_000
    for number in range(many):
        server.send(b"client", Abort(transfer_id=str(number), reason="x" * 900))
    first = until(lambda: heard(clients))
    while more := heard(clients, 0.5):
        first += more
    assert len(first) < many
    server.send(b"client", Later(transfer_id="t"))
    assert until(lambda: heard(clients)) == [(server.address, Later(transfer_id="t"))]


def test_messages_left_by_a_turn_end_the_next_wait_at_once(
    server: ControlServer, clients: ControlClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ tells of messages once, when they come."""
    monkeypatch.setattr(control, "MAX_AT_ONCE", 3)
    clients.send(server.address, Later(transfer_id="hello"))
    until(server.receive)
    for number in range(8):
        clients.send(server.address, Later(transfer_id=str(number)))
        server.send(b"client", Later(transfer_id=str(number)))
    time.sleep(0.2)
    for end in (server, clients):
        found = 0
        while found < 8:
            begin_s = time.monotonic()
            end.wait(DEADLINE_S)
            assert time.monotonic() - begin_s < DEADLINE_S / 2
            piece = len(end.receive())
            assert piece <= 3
            found += piece


def test_the_oldest_consumer_is_left(
    clients: ControlClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONSUMERS", 2)
    servers = [ControlServer("tcp://127.0.0.1:*", "server", keys()) for _ in range(3)]
    first, second, third = (server.address for server in servers)

    def connected() -> set[str]:
        open_ = psutil.Process().net_connections("tcp")
        return {f"tcp://{each.raddr.ip}:{each.raddr.port}" for each in open_ if each.raddr}

    try:
        for server in (0, 1, 0, 2):
            clients.send(servers[server].address, Later(transfer_id="t"))
            until(servers[server].receive)
        until(lambda: second not in connected())
        assert {first, third} <= connected()
        clients.send(second, Later(transfer_id="again"))
        assert until(servers[1].receive) == [(b"client", Later(transfer_id="again"))]
        servers[1].send(b"client", Later(transfer_id="answer"))
        assert until(lambda: heard(clients)) == [(second, Later(transfer_id="answer"))]
    finally:
        for each in servers:
            each.close()


def test_a_new_connection_replaces_the_old(server: ControlServer, clients: ControlClients) -> None:
    """The old one is open, as after a loss of the network that the server has not detected."""
    # It is gone, and would otherwise fight for its place.
    with dealer(server.address, identity=b"client", reconnect_ivl=-1) as former:
        former.send(encode(Later(transfer_id="first"), session="client"))
        until(server.receive)
        clients.send(server.address, Later(transfer_id="second"))
        assert until(server.receive) == [(b"client", Later(transfer_id="second"))]
        server.send(b"client", Later(transfer_id="answer"))
        answered = until(lambda: heard(clients))
        assert answered == [(server.address, Later(transfer_id="answer"))]


def test_a_silent_consumer_stops_none(
    clients: ControlClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HIGH_WATER_MARK", 3)
    for number in range(20):
        clients.send("tcp://127.0.0.1:9", Later(transfer_id=str(number)))


def test_an_address_that_is_none_is_an_error(clients: ControlClients) -> None:
    with pytest.raises(TransportError, match="nonsense"):
        clients.send("nonsense", Later(transfer_id="t"))


def test_no_socket_left_is_an_error_for_now(server: ControlServer, clients: ControlClients) -> None:
    """The sender's thread hears what it can tell of; anything else ended it without a word."""
    message = Abort(transfer_id="t", reason="why")
    taken = []
    with contextlib.suppress(zmq.ZMQError):
        while True:
            taken.append(clients._context.socket(zmq.PAIR))
    try:
        with pytest.raises(TransportError, match="ulimit -n"):
            clients.send(server.address, message)
    finally:
        for each in taken:
            each.close()

    def sent() -> bool:
        try:
            clients.send(server.address, message)
        except TransportError:  # Sockets are given back by a thread of ZMQ.
            return False
        return True

    until(sent)
    assert until(server.receive) == [(b"client", message)]


def open_endpoint(folder: Path, **changed: Any) -> ConsumerEndpoint:
    fields = {
        "instance": "pd",
        "platform": "cpu",
        "pool": pool_name(),
        "path": "tcp",
        "control_address": f"ipc://{folder}/control",
        "data_address": "tcp://127.0.0.1:*",
        "secret_file": secret_file(),
    }
    config = InstanceConfig(**(fields | changed))
    return ConsumerEndpoint(config, fingerprint="", pool_bytes=4096)


@pytest.mark.parametrize("taken", ["control_address", "data_address"])
def test_a_failed_endpoint_leaves_nothing(
    server: ControlServer, tmp_path: Path, taken: str
) -> None:
    pool = pool_name()
    with pytest.raises(TransportError, match="cannot listen"):
        open_endpoint(tmp_path, pool=pool, **{taken: server.address})
    assert not (SHM_FOLDER / pool).exists()
    open_endpoint(tmp_path, pool=pool).close()
    assert not (SHM_FOLDER / pool).exists()


def test_transfer_is_verified_only_with_its_proof(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    proof = Secret.read(secret_file()).sign_transfer("t", "item", address)
    signed = Announce(
        transfer_id="t", mm_hash="x", tensor=SPEC, producer=peer(), item_uuid="item", proof=proof
    )
    with closing(open_endpoint(tmp_path)) as endpoint:
        assert endpoint.verify_transfer(signed)
        assert not endpoint.verify_transfer(msgspec.structs.replace(signed, transfer_id="u"))
        assert not endpoint.verify_transfer(msgspec.structs.replace(signed, proof=""))


def test_abort_of_a_load_reaches_the_loader_of_the_store(tmp_path: Path) -> None:
    store = StoreSection(kind="file", path=str(tmp_path / "store"))
    with closing(open_endpoint(tmp_path, store=store)) as endpoint:
        endpoint.send(IDENTITY, Abort(transfer_id="t", attempt=9, reason="why"))
        ((identity, reply),) = endpoint.receive()
    assert identity == IDENTITY
    assert isinstance(reply, Nack) and reply.code is NackCode.RELEASED


def waited(server: ControlServer, timeout_s: float = DEADLINE_S) -> float:
    """Return how many seconds a wait took."""
    begin_s = time.monotonic()
    server.wait(timeout_s)
    return time.monotonic() - begin_s


def test_a_wait_ends_by_message_wake_time(server: ControlServer, clients: ControlClients) -> None:
    while server.receive() or waited(server, 0.05) < 0.05:
        pass
    waker = threading.Timer(0.05, server.wake)
    waker.start()
    assert waited(server) < DEADLINE_S / 2
    waker.join()
    assert server.receive() == []
    assert waited(server, 0.05) >= 0.05, "it is woken once"
    messages: list[tuple[bytes, AnyMessage]] = []
    clients.send(server.address, Later(transfer_id="t"))
    while not messages:
        assert waited(server) < DEADLINE_S / 2
        messages = server.receive()
    assert messages == [(b"client", Later(transfer_id="t"))]


def test_a_message_during_sends_ends_waits(server: ControlServer, clients: ControlClients) -> None:
    """ZMQ tells once that one has come, and it may tell the sender: nobody would hear of it."""
    clients.send(server.address, Later(transfer_id="first"))
    until(server.receive)
    for number in range(200):
        clients.send(server.address, Later(transfer_id=str(number)))
        end_s = time.monotonic() + 0.0005 * (number % 5)
        server.send(b"client", Later(transfer_id="answer"))
        while time.monotonic() < end_s:
            server.send(b"client", Later(transfer_id="answer"))
        found: list[tuple[bytes, AnyMessage]] = []
        while not found:
            assert waited(server) < DEADLINE_S / 2
            found = server.receive()
        assert [message.transfer_id for _, message in found] == [str(number)]
