"""The router's end of the control channels of the prefill+decode instances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Collection, Iterator, Mapping

import zmq
import zmq.asyncio

from epd_portable.connector.control import new_session
from epd_portable.errors import ConfigError, EPDError
from epd_portable.wire import codec
from epd_portable.wire.messages import EncodeFailed, Nack, NackCode

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 5000

DECISIVE = frozenset({NackCode.TOO_LARGE, NackCode.UNAVAILABLE})
"""Refusals that end a request; after the others the instance goes on by itself."""


class Inbox:
    """Why one request's transfers were refused, if that ends the request."""

    def __init__(self) -> None:
        self.nacks: list[Nack] = []
        self._arrived = asyncio.Event()

    def put(self, nack: Nack) -> None:
        """Add a refusal, unless the instance goes on in spite of it."""
        if nack.code not in DECISIVE:
            return
        self.nacks.append(nack)
        self._arrived.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when there is a refusal, at the latest after ``timeout_s``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)


class ControlChannels:
    """One connection to each prefill+decode instance.

    Attributes:
        identity: The name under which the instances can send to this router.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.identity = f"router-{uuid.uuid4().hex}"
        self._session = new_session()
        self._addresses = dict(addresses)
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._inboxes: dict[str, Inbox] = {}

    async def open(self) -> None:
        """Connect to every instance, present or not, and listen.

        Raises:
            ConfigError: An address is not one that ZMQ can use.
        """
        for name, address in self._addresses.items():
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self.identity.encode())
            socket.setsockopt(zmq.LINGER, 0)
            # A message for an instance that is away would reach its next life: refuse it instead.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._sockets[name] = socket
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"instance {name!r}: control address {address!r} cannot be used: {error}"
                ) from error
            self._readers.append(asyncio.create_task(self._read(name, socket)))

    async def close(self) -> None:
        """Stop listening and close every connection."""
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._context.destroy(linger=0)

    async def encode_failed(self, instance: str, transfer_id: str, reason: str) -> None:
        """Tell an instance that no encoder will deliver an item.

        If the instance cannot be reached, this is logged: its own deadline decides then.
        """
        message = EncodeFailed(transfer_id=transfer_id, reason=reason)
        data = codec.encode(message, session=self._session)
        try:
            await self._sockets[instance].send(data, flags=zmq.NOBLOCK)
        except zmq.Again:
            logger.warning(
                "control channel of %s is away: it learns nothing of %s", instance, message
            )

    @contextlib.contextmanager
    def expect(self, transfer_ids: Collection[str]) -> Iterator[Inbox]:
        """Collect what is refused of these transfers."""
        inbox = Inbox()
        self._inboxes.update(dict.fromkeys(transfer_ids, inbox))
        try:
            yield inbox
        finally:
            for transfer_id in transfer_ids:
                del self._inboxes[transfer_id]

    async def _read(self, name: str, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                message, _ = codec.decode(frames[-1])
            except EPDError as error:
                logger.warning("control channel of %s: %s", name, error)
                continue
            if not isinstance(message, Nack):
                logger.warning("control channel of %s: unexpected %s", name, message)
                continue
            logger.warning(
                "%s refused %s (%s): %s",
                name,
                message.transfer_id,
                message.code.value,
                message.detail,
            )
            inbox = self._inboxes.get(message.transfer_id)
            if inbox is not None:
                inbox.put(message)
