"""The control channel's sockets: what a stranger may send, and peers that come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from epd_portable.config.instance import InstanceConfig
from epd_portable.connector import control
from epd_portable.connector.control import ControlClients, ControlServer
from epd_portable.connector.endpoint import ConsumerEndpoint
from epd_portable.connector.pool import SHM_FOLDER
from epd_portable.connector.transport import LeaseFence
from epd_portable.errors import TransportError
from epd_portable.wire.codec import MAX_MESSAGE_BYTES, encode
from epd_portable.wire.messages import Abort, Later

T = TypeVar("T")
DEADLINE_S = 20.0


def until(poll: Callable[[], list[T]]) -> list[T]:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := poll()):
        assert time.monotonic() < deadline_s, "nothing arrived"
        time.sleep(0.001)
    return found


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer("tcp://127.0.0.1:*", "server")
    yield made
    made.close()


@pytest.fixture
def clients() -> Iterator[ControlClients]:
    made = ControlClients("client")
    yield made
    made.close()


def test_messages_go_both_ways(server: ControlServer, clients: ControlClients) -> None:
    question = Abort(transfer_id="t", reason="why")
    clients.send(server.address, question)
    assert until(server.receive) == [(b"client", question)]
    answer = Later(transfer_id="t")
    server.send(b"client", answer)
    assert until(lambda: clients.receive(0.1)) == [(server.address, answer)]


def test_what_is_no_message_is_dropped_and_the_next_one_arrives(
    server: ControlServer, clients: ControlClients
) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(server.address)
    good = encode(Later(transfer_id="t"), session="s")
    for frames in (
        [b""],
        [b"", b""],
        [b"garbage"],
        [good[:-1]],
        [b"\xc1" * (MAX_MESSAGE_BYTES + 1)],
        [bytes([good[0], good[1] + 1]) + good[2:]],
        [good],
    ):
        stranger.send_multipart(frames)
    ((_, message),) = until(server.receive)
    assert message == Later(transfer_id="t")
    context.destroy(linger=0)


def test_sending_to_somebody_who_is_not_there_is_no_error(server: ControlServer) -> None:
    server.send(b"nobody", Later(transfer_id="t"))


def test_a_consumer_that_never_reads_does_not_stop_its_producer(
    clients: ControlClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HIGH_WATER_MARK", 3)
    for number in range(20):
        clients.send("tcp://127.0.0.1:9", Later(transfer_id=str(number)))


def test_waking_ends_a_wait_and_is_no_message(clients: ControlClients) -> None:
    clients.wake()
    begin_s = time.monotonic()
    assert clients.receive(DEADLINE_S) == []
    assert time.monotonic() - begin_s < DEADLINE_S / 2


def test_an_address_that_is_none_is_an_error(clients: ControlClients) -> None:
    with pytest.raises(TransportError, match="nonsense"):
        clients.send("nonsense", Later(transfer_id="t"))


def test_an_address_that_is_taken_is_an_error(server: ControlServer) -> None:
    with pytest.raises(TransportError, match="cannot listen"):
        ControlServer(server.address, "second")


@pytest.mark.parametrize("taken", ["control_address", "data_address"])
def test_an_endpoint_that_cannot_be_opened_leaves_nothing(
    server: ControlServer, tmp_path: Path, taken: str
) -> None:
    pool = f"epd-test-{tmp_path.name}-{time.monotonic_ns()}"
    addresses = {
        "control_address": f"ipc://{tmp_path}/control",
        "data_address": "tcp://127.0.0.1:*",
    }

    def open_endpoint(**changed: str) -> ConsumerEndpoint:
        config = InstanceConfig(instance="pd", platform="cpu", pool=pool, **(addresses | changed))
        return ConsumerEndpoint(config, fingerprint="", pool_bytes=4096, fence=LeaseFence())

    with pytest.raises(TransportError):
        open_endpoint(**{taken: server.address})
    assert not (SHM_FOLDER / pool).exists()
    open_endpoint().close()
    assert not (SHM_FOLDER / pool).exists()
