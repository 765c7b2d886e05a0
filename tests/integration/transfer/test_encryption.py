"""Control and `tcp`: encrypted, and for holders of the secret only, whatever the address.

127.0.0.2 stands for an address of a network: only 127.0.0.1 counts as this host.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import zmq

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms import registry
from epd_portable.transfer.control import ControlClients, ControlServer
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.curve import CurveKeys, is_off_host, read_keys
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.transfer.paths.tcp import TcpReceiver, TcpWriter
from epd_portable.transfer.pool import SharedMemory
from epd_portable.wire.codec import encode
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import Abort, Later
from tests.receiving import slot_write, tcp_receiver
from tests.waiting import until

OFF_HOST = "127.0.0.2"
ADDRESSES = {
    "this host": "tcp://127.0.0.1:*",
    "a network": f"tcp://{OFF_HOST}:*",
    "a file": "ipc://{folder}/control",
}
DEADLINE_S = 20.0
SHORT_S = 1.0
"""Seconds of waiting for a message that must not arrive."""

WORDS = b"nobody else reads this, " * 40


def keys() -> CurveKeys:
    return CurveKeys.derive(Secret(uuid.uuid4().hex))


class Forwarder:
    """Passes bytes on between a client and a server, and keeps them."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen = bytearray()
        self._target = target
        self._listener = socket.create_server((OFF_HOST, 0))
        self.address = f"tcp://{OFF_HOST}:{self._listener.getsockname()[1]}"
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._open += [client, server]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
        except OSError:
            pass


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


Make = Callable[..., ControlServer]


@pytest.fixture
def make_server(stack: ExitStack) -> Make:
    def make(held: CurveKeys, address: str = ADDRESSES["a network"]) -> ControlServer:
        server = ControlServer(address, "server", held)
        stack.callback(server.close)
        return server

    return make


@pytest.fixture(params=ADDRESSES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ADDRESSES[request.param].format(folder=tmp_path)


def clients(stack: ExitStack, held: CurveKeys) -> ControlClients:
    made = ControlClients("client", held)
    stack.callback(made.close)
    return made


def plain_socket(stack: ExitStack, kind: int) -> zmq.Socket[bytes]:
    context = zmq.Context()
    stack.callback(context.term)
    made = context.socket(kind)
    stack.callback(made.close, linger=0)
    return made


def tell(stranger: zmq.Socket[bytes], *parts: bytes) -> None:
    """Send as long as there is somebody: of one that was refused already nothing goes out, ever."""
    with suppress(zmq.Again):
        stranger.send_multipart(parts, zmq.DONTWAIT)


def test_holders_of_the_secret_can_talk(stack: ExitStack, make_server: Make, address: str) -> None:
    held = keys()
    server, client = make_server(held, address), clients(stack, held)
    client.send(server.address, Abort(transfer_id="t", reason="why"))
    until(server.receive)
    answer = Later(transfer_id="t")
    server.send(b"client", answer)
    assert until(client.receive) == [(server.address, answer)]


def test_idle_connections_are_kept_alive_by_both_ends(stack: ExitStack, make_server: Make) -> None:
    def timers() -> list[str]:
        # Columns of proc(5): addresses, state and queues come before timer and its time.
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port, established = f"{port_of(server.address):04X}", "01"
        return [
            line[5].partition(":")[0]
            for line in lines
            if line[3] == established and port in (line[1][-4:], line[2][-4:])
        ]

    held = keys()
    server, client = make_server(held), clients(stack, held)
    client.send(server.address, Later(transfer_id="t"))
    until(server.receive)
    keep_alive_is_pending = "02"
    until(lambda: timers() == 2 * [keep_alive_is_pending])


@pytest.mark.parametrize("knows", ["another secret", "the clients' key", "nothing"])
def test_strangers_are_refused(
    stack: ExitStack, make_server: Make, address: str, knows: str
) -> None:
    held = keys()
    server = make_server(held, address)
    message = Abort(transfer_id="t", reason="why")
    if knows == "another secret":
        clients(stack, keys()).send(server.address, message)
    else:
        stranger = plain_socket(stack, zmq.DEALER)
        if knows == "the clients' key":
            stranger.curve_publickey = held.client_public
            stranger.curve_secretkey = held.client_secret
            stranger.curve_serverkey, _ = zmq.curve_keypair()
        stranger.connect(server.address)
        tell(stranger, encode(message, session="s"))
    heard: list[object] = []
    until(lambda: heard.extend(server.receive()) or server._listener.refused)
    assert heard == []
    clients(stack, held).send(server.address, message)
    until(server.receive)


def test_a_client_tells_nothing_to_a_server_without_keys(stack: ExitStack, address: str) -> None:
    """Somebody who listens in a consumer's place learns nothing."""
    listener = plain_socket(stack, zmq.ROUTER)
    listener.bind(address)
    client = clients(stack, keys())
    client.send(listener.LAST_ENDPOINT.decode(), Abort(transfer_id="t", reason="why"))
    assert not listener.poll(SHORT_S * 1000)


def test_a_listener_between_the_two_reads_nothing(stack: ExitStack, make_server: Make) -> None:
    held = keys()
    server = make_server(held)
    forwarder = Forwarder((OFF_HOST, port_of(server.address)))
    stack.callback(forwarder.close)
    message = Abort(transfer_id="t", reason=WORDS.decode())
    clients(stack, held).send(forwarder.address, message)
    until(server.receive)
    assert len(forwarder.seen) > len(WORDS)
    assert WORDS[:12] not in forwarder.seen


Receive = Callable[..., tuple[TcpReceiver, SharedMemory]]
SLOT = SlotDescriptor(pool="pool", offset=0, nbytes=len(WORDS), generation=1)


@pytest.fixture
def receive(stack: ExitStack) -> Receive:
    def make(held: CurveKeys, host: str = OFF_HOST) -> tuple[TcpReceiver, SharedMemory]:
        fence = LeaseFence()
        fence.allow(SLOT)
        address = f"tcp://{host}:*"
        return stack.enter_context(tcp_receiver(data_address=address, fence=fence, keys=held))

    return make


def write(
    address: str,
    held: CurveKeys,
    limit_s: float = DEADLINE_S,
    item: torch.Tensor | None = None,
    slot: SlotDescriptor = SLOT,
) -> None:
    copies = DeviceCopies(registry.get("cpu"))
    writer = TcpWriter(copies, held)
    try:
        src = torch.frombuffer(bytearray(WORDS), dtype=torch.uint8) if item is None else item
        writer.write(slot_write(copies, src, slot, address, limit_s))
    finally:
        writer.close()


def content(memory: SharedMemory) -> bytes:
    return bytes(memory.tensor(0, len(WORDS)).tolist())


def test_a_listener_reads_nothing_of_an_item(stack: ExitStack, receive: Receive) -> None:
    held = keys()
    receiver, memory = receive(held)
    forwarder = Forwarder((OFF_HOST, port_of(receiver.address)))
    stack.callback(forwarder.close)
    write(forwarder.address, held)
    assert content(memory) == WORDS
    assert len(forwarder.seen) > len(WORDS)
    assert WORDS[:12] not in forwarder.seen


@pytest.mark.parametrize("host", ["127.0.0.1", OFF_HOST])
def test_a_stranger_with_another_secret_writes_nothing(receive: Receive, host: str) -> None:
    receiver, memory = receive(keys(), host)
    before = content(memory)
    with pytest.raises(TransportTimeoutError):
        write(receiver.address, keys(), limit_s=SHORT_S)
    assert content(memory) == before


@pytest.mark.parametrize(
    ("address", "off"),
    [
        ("tcp://127.0.0.1:5", False),
        ("tcp://127.0.0.1:*", False),
        ("tcp://localhost:5", False),
        ("tcp://[::1]:5", False),
        ("ipc:///tmp/x", False),
        ("127.0.0.1", False),
        ("tcp://127.0.0.2:5", True),
        ("tcp://10.0.0.1:5", True),
        ("tcp://0.0.0.0:5", True),
        ("tcp://127.0.0.1.example.org:5", True),
        ("tcp://*:5", True),
        ("10.0.0.1", True),
    ],
)
def test_only_one_address_is_this_host(address: str, off: bool) -> None:
    assert is_off_host(address) == off


def test_copies_of_secret_give_same_keys_and_nothing_shows_them(tmp_path: Path) -> None:
    make_secret_file(str(tmp_path / "secret"))
    one, two = (read_keys(str(tmp_path / "secret")) for _ in range(2))
    assert one == two
    assert one.server_public != one.client_public
    for hidden in (one.server_secret, one.client_secret):
        assert hidden.decode() not in repr(one)
