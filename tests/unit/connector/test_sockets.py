from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from epd_portable.connector import sockets

DEADLINE_S = 20.0
HOST = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as made:
        yield made


def test_ports_open_to_all_interfaces_are_found(listening: socket.socket) -> None:
    with socket.create_server(("", 0)) as everywhere:
        port = everywhere.getsockname()[1]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("", 0))
            found = sockets.open_ports()
            assert port in found
            assert not {listening.getsockname()[1], other.getsockname()[1]} & found
    assert port not in sockets.open_ports()


def test_who_waits_for_a_connection_for_ever_does_so_no_more(listening: socket.socket) -> None:
    ended: list[BaseException] = []

    def accept_all() -> None:
        try:
            while True:
                listening.accept()[0].close()
        except OSError as error:
            ended.append(error)

    # What it blocks in is the kernel's: Python's own timeouts would make the socket wait otherwise.
    thread = threading.Thread(target=accept_all, daemon=True)
    thread.start()
    sockets.hasten_accepts(listening.getsockname()[1])
    thread.join(DEADLINE_S)
    assert [type(error) for error in ended] == [BlockingIOError]


@pytest.mark.parametrize("there", [True, False], ids=["these", "others"])
def test_only_these_connections_are_reset(listening: socket.socket, there: bool) -> None:
    port = listening.getsockname()[1]
    client = socket.create_connection((HOST, port))
    server, _ = listening.accept()
    with server:
        server.settimeout(DEADLINE_S)
        sockets.reset_on_close(HOST, [port if there else port - 1])
        client.close()
        if there:
            with pytest.raises(ConnectionResetError):
                server.recv(1)
        else:
            assert server.recv(1) == b""


def test_who_has_closed_a_connection_has_hung_up(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    with socket.create_connection((HOST, port)) as client:
        client.settimeout(DEADLINE_S)
        server, _ = listening.accept()
        assert not sockets.has_hung_up(HOST, [port])
        server.close()
        assert client.recv(1) == b"", "it is known here"
        assert sockets.has_hung_up(HOST, [port])
        assert not sockets.has_hung_up(HOST, [port - 1])


def test_a_host_that_nobody_knows_has_no_connections() -> None:
    sockets.reset_on_close("no-such-host.invalid", [1])
    assert not sockets.has_hung_up("no-such-host.invalid", [1])
