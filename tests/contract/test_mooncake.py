"""What Mooncake's engine does with a transfer that did not end well, beside what the suite asks."""

from __future__ import annotations

import base64
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from epd_portable.connector import sockets
from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import Transport
from epd_portable.connector.transports import mooncake
from epd_portable.connector.transports.mooncake import MooncakeReceiver, _parse
from epd_portable.errors import (
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    UnsupportedError,
)
from epd_portable.wire.descriptors import SlotDescriptor
from tests.contract.pairs import Pair, Route
from tests.contract.transport_consumer import DEADLINE_S, MIB, Consumer, digest
from tests.receiving import receiving_end, slot_write
from tests.waiting import until

pytestmark = pytest.mark.needs_mooncake
ROUTE = Route("mooncake", Pair("cpu", "cpu"))
MORE_THAN_THE_KERNEL_TAKES = 16 * MIB


@pytest.fixture
def transport() -> Iterator[Transport]:
    made = ROUTE.transport()
    yield made
    made.close()


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    made = Consumer(ROUTE)
    yield made
    made.signal(signal.SIGCONT)
    made.close()


def source(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=generator)


def write(
    transport: Transport,
    consumer: Consumer,
    src: torch.Tensor,
    slot: SlotDescriptor,
    seconds: float = 30.0,
) -> None:
    transport.write(slot_write(transport._copies, src, slot, consumer.address, seconds))


class PatientWrite:
    """A write in a thread of its own, which would wait for minutes."""

    def __init__(
        self, transport: Transport, consumer: Consumer, src: torch.Tensor, slot: SlotDescriptor
    ) -> None:
        self._words = (transport, consumer, src, slot)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            write(*self._words, seconds=300.0)
        except BaseException as error:  # handed to the test's own thread
            self._error = error

    def lost(self) -> PeerLostError:
        """Return why it ended, which is that the consumer was given up."""
        self._thread.join(DEADLINE_S)
        assert isinstance(self._error, PeerLostError)
        return self._error


def assert_serves(transport: Transport, consumer: Consumer) -> None:
    src = source(MIB)
    write(transport, consumer, src, consumer.grant(MIB, MIB))
    assert consumer.digest(MIB, MIB) == digest(src)


def on_their_way(ports: tuple[int, ...]) -> int:
    """Return how many bytes this machine's kernel still wants to send to ports."""
    unsent = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, there, _, queues, *_ = line.split()
        if int(there.partition(":")[2], 16) in ports:
            unsent += int(queues.partition(":")[0], 16)
    return unsent


def test_nothing_is_on_its_way_any_more_when_a_write_has_missed_its_lease(
    transport: Transport, consumer: Consumer
) -> None:
    assert_serves(transport, consumer)
    ports = _parse(consumer.address).data_ports
    assert ports
    src = source(MORE_THAN_THE_KERNEL_TAKES)
    slot = consumer.grant(0, src.numel())
    consumer.signal(signal.SIGSTOP)
    with pytest.raises(TransportTimeoutError, match=r"transfer\.lease_s"):
        write(transport, consumer, src, slot, seconds=1.0)
    assert on_their_way(ports) == 0
    consumer.signal(signal.SIGCONT)
    assert_serves(transport, consumer)


def test_another_write_to_the_consumer_ends_with_one_that_missed_its_lease(
    transport: Transport, consumer: Consumer
) -> None:
    assert_serves(transport, consumer)
    ports = _parse(consumer.address).data_ports
    src = source(MORE_THAN_THE_KERNEL_TAKES)
    slots = [consumer.grant(offset, src.numel()) for offset in (0, src.numel())]
    consumer.signal(signal.SIGSTOP)
    patient = PatientWrite(transport, consumer, src, slots[0])
    until(lambda: on_their_way(ports))
    with pytest.raises(TransportTimeoutError):
        write(transport, consumer, src, slots[1], seconds=1.0)
    assert "another write" in str(patient.lost())
    consumer.signal(signal.SIGCONT)
    assert_serves(transport, consumer)


def test_a_consumer_that_does_not_answer_ends_whoever_waits_with_the_first_that_cannot(
    transport: Transport, consumer: Consumer
) -> None:
    src = source(MIB)
    slots = [consumer.grant(offset, src.numel()) for offset in (0, src.numel())]
    consumer.signal(signal.SIGSTOP)
    patient = PatientWrite(transport, consumer, src, slots[0])
    until(lambda: "epd-mooncake-open" in {each.name for each in threading.enumerate()})
    with pytest.raises(TransportTimeoutError, match="did not answer"):
        write(transport, consumer, src, slots[1], seconds=1.0)
    patient.lost()
    consumer.signal(signal.SIGCONT)
    assert_serves(transport, consumer)


def test_ends_that_move_bytes_in_different_ways_take_another_path(
    transport: Transport, consumer: Consumer
) -> None:
    other = msgspec.structs.replace(_parse(consumer.address), protocol="rdma-of-another-kind")
    consumer.address = base64.b85encode(msgspec.msgpack.encode(other)).decode()
    with pytest.raises(UnsupportedError, match="tcp here and by rdma-of-another-kind"):
        write(transport, consumer, source(MIB), consumer.grant(0, MIB))


@pytest.mark.parametrize(
    "change",
    [{"base": 1 << 60}, {"base": -1}, {"nbytes": -1}, {"port": 0}, {"host": ".."}, {"host": "\0"}],
    ids=str,
)
def test_an_address_that_leads_nowhere_is_refused(
    transport: Transport, consumer: Consumer, change: dict[str, Any]
) -> None:
    other = msgspec.structs.replace(_parse(consumer.address), **change)
    consumer.address = base64.b85encode(msgspec.msgpack.encode(other)).decode()
    with pytest.raises(TransportError, match="no address of mooncake"):
        write(transport, consumer, source(MIB), consumer.grant(0, MIB))


def test_memory_that_the_consumer_does_not_have_is_not_written(
    transport: Transport, consumer: Consumer
) -> None:
    peer = _parse(consumer.address)
    address = consumer.address
    other = msgspec.structs.replace(peer, base=peer.base + peer.nbytes)
    consumer.address = base64.b85encode(msgspec.msgpack.encode(other)).decode()
    with pytest.raises(PeerLostError):
        write(transport, consumer, source(MIB), consumer.grant(0, MIB))
    consumer.address = address
    assert_serves(transport, consumer)


def test_rdma_is_taken_where_there_is_a_card_and_nobody_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_RDMA_DEVICES", tmp_path / "none")
    assert {mooncake.protocol_of(name) for name in ("cpu", "cuda")} == {"tcp"}
    (tmp_path / "some" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(mooncake, "_RDMA_DEVICES", tmp_path / "some")
    assert {mooncake.protocol_of(name) for name in ("cpu", "cuda")} == {"rdma"}
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert mooncake.protocol_of("cpu") == "tcp"
    assert mooncake.protocol_of("npu") == "ascend"


@pytest.mark.parametrize(("host", "device"), [("127.0.0.1", b"lo\0"), ("127.0.0.2", b"")])
def test_other_hosts_connect_only_to_who_is_to_be_reached(host: str, device: bytes) -> None:
    name = f"epd-test-{uuid.uuid4().hex[:12]}"
    memory = SharedMemory.create(name, MIB)
    try:
        receiver = MooncakeReceiver(receiving_end(memory, host=host))
        peer = _parse(receiver.address)
        bound = {
            each.getsockname()[1]: each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
            for each in sockets._listening()
        }
        assert {bound[port] for port in (peer.port, *peer.data_ports)} == {device}
        receiver.close()
        assert not {peer.port, *peer.data_ports} & sockets.open_ports()
    finally:
        memory.unlink()


def test_nobody_connects_to_a_producer(transport: Transport, consumer: Consumer) -> None:
    before = sockets.open_ports()
    assert_serves(transport, consumer)
    opened = sockets.open_ports() - before
    assert len(opened) == 2, "its handshake and its data"
    devices = {
        each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
        for each in sockets._listening()
        if each.getsockname()[1] in opened
    }
    assert devices == {b"lo\0"}
