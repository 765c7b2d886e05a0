"""Peers without the secret, on any address: ignored, and no burden.

Strangers speak ZMQ's protocol byte by byte here, so that they can do what its library never does.
"""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator

import psutil
import pytest
import zmq

from epd_portable.transfer.curve import OVERHEAD_BYTES
from epd_portable.transfer.paths.tcp import CHUNK_BYTES, TcpReceiver
from tests.receiving import tcp_receiver

DEADLINE_S = 20.0
FLOOD_BYTES = 64 << 20
FRAME_BYTES = 8 << 10
LITTLE_BYTES = 16 << 20
"""Most bytes by which a process may grow while a flood runs against it."""
MORE = b"\x03"
"""Flags of a frame with a length of 8 bytes to which others of the same message follow."""


def greeting(mechanism: bytes) -> bytes:
    version = b"\x03\x00"
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
OPENINGS = {
    "no encryption": greeting(b"NULL") + b"\x04" + bytes([len(_READY)]) + _READY,
    "no handshake": greeting(b"CURVE"),
}


def flood(address: str, opening: bytes) -> tuple[int, int]:
    """Send one message without end to a socket of this process.

    Returns:
        How many bytes of it were taken, and by how many the process grew.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    frame = MORE + FRAME_BYTES.to_bytes(8, "big") + bytes(FRAME_BYTES)
    taken, before = 0, resident_bytes()
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(opening)
        said = b""
        try:
            # Its greeting, and all of the handshake that there is without a key.
            while b"READY" not in said and b"CURVE" not in said and (data := stranger.recv(4096)):
                said += data
            while taken < FLOOD_BYTES:
                stranger.sendall(frame)
                taken += len(frame)
        except (ConnectionError, TimeoutError):
            pass
        return taken, resident_bytes() - before


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def receiver() -> Iterator[TcpReceiver]:
    with tcp_receiver() as (made, _):
        yield made


@pytest.mark.parametrize("channel", ["server", "receiver"])
@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
def test_an_endless_message_ends(
    request: pytest.FixtureRequest, channel: str, opening: bytes
) -> None:
    taken, grown = flood(request.getfixturevalue(channel).address, opening)
    assert taken < FLOOD_BYTES
    assert grown < LITTLE_BYTES


def test_large_message_makes_a_process_without_key_check_grow() -> None:
    """Else the test above would prove nothing."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        plain.linger = 0
        plain.setsockopt(zmq.MAXMSGSIZE, 2 * FRAME_BYTES)
        plain.bind("tcp://127.0.0.1:*")
        taken, grown = flood(plain.LAST_ENDPOINT.decode(), OPENINGS["no encryption"])
        assert taken >= FLOOD_BYTES
        assert grown > FLOOD_BYTES // 2


def test_little_is_taken_of_each_stranger(receiver: TcpReceiver) -> None:
    """ZMQ takes in a frame of their handshake up to the limit of all frames."""
    strangers, nbytes = 24, CHUNK_BYTES + OVERHEAD_BYTES
    host, _, port = receiver.address.removeprefix("tcp://").rpartition(":")
    before = resident_bytes()
    with contextlib.ExitStack() as opened:
        for _ in range(strangers):
            stranger = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
            opened.enter_context(stranger)
            stranger.sendall(greeting(b"CURVE"))
            assert stranger.recv(64)
            command = b"\x06"
            stranger.sendall(command + nbytes.to_bytes(8, "big") + bytes(nbytes - 1))
        grown = resident_bytes() - before
    assert grown < strangers * (1.5 * (1 << 20))
