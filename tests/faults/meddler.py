"""A man in the middle of the control channel, who loses, repeats, delays and cuts messages."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from epd_portable.transfer.curve import Listener, secure_client
from epd_portable.wire.codec import MAX_MESSAGE_BYTES
from tests.keyring import keys

Fault = Callable[[random.Random, bytes], list[tuple[float, bytes]]]
"""Effect on a message: ``(delay_s, bytes)`` of each that is passed on, in seconds."""


def untouched(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    return [(0.0, data)]


def dropped(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    return [] if chance.random() < 0.3 else [(0.0, data)]


def duplicated(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    return [(0.0, data), (chance.uniform(0.0, 0.3), data)]


def delayed(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    return [(chance.uniform(0.0, 0.5), data)]


def reordered(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    """Later by so little that the next message often overtakes it."""
    return [(chance.choice((0.0, 0.02, 0.05)), data)]


def truncated(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    if chance.random() < 0.7:
        return [(0.0, data)]
    return [(0.0, data[: chance.randrange(len(data))])]


def everything(chance: random.Random, data: bytes) -> list[tuple[float, bytes]]:
    """Apply one of the others, chosen again for each message."""
    fault = chance.choice((untouched, dropped, duplicated, delayed, reordered, truncated))
    return fault(chance, data)


FAULTS: tuple[Fault, ...] = (dropped, duplicated, delayed, reordered, truncated, everything)
LOSSY = (dropped, truncated, everything)


@dataclass(frozen=True)
class Seen:
    """A message that came by.

    Attributes:
        producer: ZMQ identity of the producer at one end.
        to_consumer: The direction.
        data: Its bytes.
    """

    producer: bytes
    to_consumer: bool
    data: bytes


class Meddler:
    """Stands between producers and a consumer: a ROUTER for them, a DEALER to it for each.

    Args:
        address: Where producers connect.
        consumer: ZMQ address of the consumer's control channel.
        fault: What happens to messages.
        seed: Of its decisions.
    """

    def __init__(self, address: str, consumer: str, fault: Fault, seed: int) -> None:
        self.address = address
        self.seen: list[Seen] = []
        self._consumer = consumer
        self._fault = fault
        self._chance = random.Random(seed)
        self._due: list[tuple[float, int, Seen]] = []
        self._number = itertools.count()
        self._replay: list[Seen] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="meddler")
        self._thread.start()

    def replay(self, messages: list[Seen]) -> None:
        """Send messages again, in any order, within the next second."""
        self._replay = messages

    def close(self) -> None:
        """Stop passing messages on."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        listener = Listener(
            self.address, keys(), name="meddler", max_bytes=MAX_MESSAGE_BYTES, waiting=1000
        )
        front = listener.socket
        with zmq.Context() as context:
            backs: dict[bytes, zmq.Socket[bytes]] = {}
            while not self._stop:
                while front.poll(1):
                    producer, data = front.recv_multipart()
                    self._take(Seen(producer, True, data))
                for producer, back in backs.items():
                    while back.poll(0):
                        self._take(Seen(producer, False, back.recv()))
                replay, self._replay = self._replay, []
                for seen in replay:
                    self._later(self._chance.uniform(0.0, 1.0), seen)
                while self._due and self._due[0][0] <= time.monotonic():
                    _, _, seen = heapq.heappop(self._due)
                    if not seen.to_consumer:
                        front.send_multipart([seen.producer, seen.data])
                        continue
                    if seen.producer not in backs:
                        back = backs[seen.producer] = context.socket(zmq.DEALER)
                        back.setsockopt(zmq.IDENTITY, seen.producer)
                        secure_client(back, keys())
                        back.connect(self._consumer)
                    backs[seen.producer].send(seen.data)
            listener.close()
            for socket in backs.values():
                socket.close(linger=0)

    def _take(self, seen: Seen) -> None:
        self.seen.append(seen)
        for delay_s, data in self._fault(self._chance, seen.data):
            self._later(delay_s, Seen(seen.producer, seen.to_consumer, data))

    def _later(self, delay_s: float, seen: Seen) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._number), seen))
