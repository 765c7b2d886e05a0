"""The router's end of the control channels of the prefill+decode instances; loads of all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlencode

import anyio
import msgspec
import zmq
import zmq.asyncio

from epd_portable.connector.curve import CurveKeys, secure_client
from epd_portable.connector.sessions import new_session
from epd_portable.errors import ConfigError, EPDError
from epd_portable.placement.instances import MAX_INSTANCES, Instance
from epd_portable.router.http.upstream import Upstream, UpstreamError
from epd_portable.wire import codec
from epd_portable.wire.messages import (
    LOAD_EVERY_S,
    LOAD_HEARTBEAT_S,
    LOAD_LEASE_S,
    LOAD_PATH,
    AnyMessage,
    EncodeFailed,
    LoadReport,
    LoadWanted,
    Nack,
    NackCode,
    NotWanted,
)

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 5000
WANT_LOAD_EVERY_S = LOAD_LEASE_S / 5
"""PD instances are asked for reports so often; a message may be lost."""
LOAD_PAUSE_S = 5.0
"""After an encode instance has not reported."""
LOAD_TIMEOUT_S = LOAD_HEARTBEAT_S + 2.0

DECISIVE = frozenset({NackCode.TOO_LARGE, NackCode.UNAVAILABLE})
"""Refusals that end a request; the others are of one encoder, and the instance awaits another."""


@dataclass(slots=True)
class Inbox:
    """What was refused of one request's transfers.

    Attributes:
        nacks: Refusals that end the request.
    """

    nacks: list[Nack] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _encoders: dict[str, asyncio.Queue[Nack]] = field(default_factory=dict)

    def put(self, nack: Nack) -> None:
        """Add a refusal."""
        if nack.code in DECISIVE:
            self.nacks.append(nack)
            self._arrived.set()
        else:
            self._refused(nack.transfer_id).put_nowait(nack)

    async def encoder_refused(self, transfer_id: str) -> Nack:
        """Return when an encoder was refused for a transfer; each refusal is returned once."""
        return await self._refused(transfer_id).get()

    async def wait(self, timeout_s: float) -> None:
        """Return when there is a refusal, at the latest after ``timeout_s``."""
        with anyio.move_on_after(timeout_s):
            await self._arrived.wait()

    def _refused(self, transfer_id: str) -> asyncio.Queue[Nack]:
        return self._encoders.setdefault(transfer_id, asyncio.Queue())


class ControlChannels:
    """One connection to each prefill+decode instance.

    Attributes:
        identity: The name under which the instances can send to this router.
        on_load: Called with the name of an instance and its report, see `want_load`.
    """

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self.identity = f"router-{uuid.uuid4().hex}"
        self.on_load: Callable[[str, LoadReport], None] | None = None
        self._session = new_session()
        self._context = zmq.asyncio.Context()
        # By default a process has 1,023, and there is one for each instance.
        self._context.set(zmq.MAX_SOCKETS, min(MAX_INSTANCES, self._context.get(zmq.SOCKET_LIMIT)))
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._inboxes: dict[str, Inbox] = {}

    def connect(self, name: str, address: str) -> None:
        """Connect to an instance, present or not, and listen; from within the event loop.

        Raises:
            ConfigError: The address is not one that ZMQ can use.
        """
        assert name not in self._sockets
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.identity.encode())
        socket.setsockopt(zmq.LINGER, 0)
        # A message for an instance that is away would reach its next life: refuse it instead.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        secure_client(socket, self._keys)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"instance {name!r}: control address {address!r} cannot be used: {error}"
            ) from error
        self._sockets[name] = socket
        self._readers[name] = asyncio.create_task(self._read(name, socket))

    async def disconnect(self, name: str) -> None:
        """Close the connection to an instance."""
        reader = self._readers.pop(name)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._sockets.pop(name).close()

    async def close(self) -> None:
        """Stop listening and close every connection."""
        for name in list(self._sockets):
            await self.disconnect(name)
        self._context.destroy(linger=0)

    def encode_failed(self, instance: str, transfer_id: str, reason: str) -> None:
        """Tell an instance that no encoder will deliver an item; never waits.

        If the instance cannot be reached, this is logged: its own deadline decides then.
        """
        self._tell(instance, EncodeFailed(transfer_id=transfer_id, reason=reason))

    def not_wanted(self, instance: str, transfer_ids: Iterable[str]) -> None:
        """Tell an instance that some transfers are not wanted any more; see `encode_failed`."""
        for transfer_id in transfer_ids:
            self._tell(instance, NotWanted(transfer_id=transfer_id))

    def want_load(self, instance: str) -> None:
        """Ask an instance to report its load to `on_load`; never waits.

        Lost if the instance cannot be reached: it is repeated anyway.
        """
        self._tell(instance, LoadWanted(), level=logging.DEBUG)

    def _tell(self, instance: str, message: AnyMessage, level: int = logging.WARNING) -> None:
        problem: object = "it has left"
        if (socket := self._sockets.get(instance)) is not None:
            data = codec.encode(message, session=self._session)
            # Without waiting it is done at once; its error is looked at, or asyncio logs it.
            problem = asyncio.ensure_future(socket.send(data, flags=zmq.NOBLOCK)).exception()
        if problem:
            words = "control channel of %s is away (%s): %r is lost"
            logger.log(level, words, instance, problem, message)

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
                message, _ = codec.decode(*frames)
            except EPDError as error:
                logger.warning("control channel of %s: %r", name, str(error))
                continue
            if isinstance(message, LoadReport):
                if self.on_load is not None:
                    self.on_load(name, message)
                continue
            if not isinstance(message, Nack):
                logger.warning("control channel of %s: unexpected %r", name, message)
                continue
            logger.warning(
                "%s refused %r (%s): %r",
                name,
                message.transfer_id,
                message.code.value,
                message.detail,
            )
            inbox = self._inboxes.get(message.transfer_id)
            if inbox is not None:
                inbox.put(message)


async def follow_load(instance: Instance, control: ControlChannels, upstream: Upstream) -> None:
    """Have an instance report its load, until this is cancelled.

    PD instances report by their control channels as long as this router asks them to. Encode
    instances have none: each is polled by HTTP, and answers when its load has changed.
    """
    if not instance.control:
        await _follow_by_http(instance, upstream)
    while True:
        await instance.wait_up()
        control.want_load(instance.name)
        await asyncio.sleep(WANT_LOAD_EVERY_S)


async def _follow_by_http(instance: Instance, upstream: Upstream) -> None:
    """Ask an encode instance again and again; each answer comes when there is news."""
    known: dict[str, int] = {}
    while True:
        await instance.wait_up()
        load = None
        with contextlib.suppress(UpstreamError, msgspec.MsgspecError):
            # Its health is for probes.
            url = f"{instance.url}{LOAD_PATH}?{urlencode(known)}"
            status, _, body = await upstream.fetch("GET", url, timeout_s=LOAD_TIMEOUT_S)
            if status == 200:
                load = msgspec.json.decode(body, type=LoadReport)
        if load is None:
            # What comes back may be another process, which reports.
            with anyio.move_on_after(LOAD_PAUSE_S):
                await instance.wait_down()
            continue
        instance.take_report(load)
        known = {"items": load.items or 0, "pixels": load.pixels or 0}
        await asyncio.sleep(LOAD_EVERY_S)
