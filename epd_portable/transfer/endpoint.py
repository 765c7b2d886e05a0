"""The consumer's end: the pool's memory, the receivers of its paths, its control channel."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from epd_portable.config.secret import Secret
from epd_portable.transfer import registry
from epd_portable.transfer.control import ControlServer
from epd_portable.transfer.curve import CurveKeys
from epd_portable.transfer.paths.base import LeaseFence, ReceivingEnd
from epd_portable.transfer.pool import SharedMemory
from epd_portable.transfer.sessions import host_identity, new_session, process_is_gone
from epd_portable.transfer.stores.base import make_store
from epd_portable.transfer.stores.entry import Seal
from epd_portable.transfer.stores.loader import IDENTITY, StoreLoader
from epd_portable.transfer.worker_endpoint import read_publication
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import Announce, AnyMessage, Nack, NackCode, Received
from epd_portable.wire.params import ExpectedTransfer

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)

MAX_LOGGED = 1000
"""Pairs of producer and path whose refusal is not logged again."""


class ConsumerEndpoint:
    """Opens what a PD instance needs to receive, and closes it.

    Args:
        fingerprint: Of what producers must agree on.
        namespace: Of the store's entries that may be loaded.

    Attributes:
        control: Its control channel, for a thread to wait at.
        fence: Lets writes through to leased slots only.
        fenced_paths: Paths whose writes go through it.

    Raises:
        ConfigError: There is no secret.
        CapacityError: ``/dev/shm`` has no space for the pool.
        TransportError: An address is taken, or the workers have not opened their end.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        fingerprint: str,
        pool_bytes: int,
        namespace: str = "",
    ) -> None:
        session = new_session()
        self.fingerprint = fingerprint
        self.fence = LeaseFence()
        self.fenced_paths = registry.fenced_paths()
        self._config = config
        self._namespace = namespace
        self._secret = Secret.read(config.secret_file)
        self._keys = CurveKeys.derive(self._secret)
        self._logged: set[tuple[str, str]] = set()
        with contextlib.ExitStack() as opened:
            self.control = ControlServer(config.control_address, session, self._keys, config.pool)
            opened.callback(self.control.close)
            self._memory = SharedMemory.create(config.pool, pool_bytes)
            opened.callback(self._memory.unlink)
            self._peer = PeerDescriptor(
                instance=config.instance,
                session=session,
                host=host_identity(),
                device=f"{config.platform}:{config.device_index}",
                fingerprint=fingerprint,
                paths=tuple(self._open_paths(opened)),
            )
            self._loader = self._make_loader(opened)
            self._opened = opened.pop_all()

    def receive(self) -> list[tuple[bytes, Received]]:
        """Return ``(identity, message)`` of control messages that have arrived."""
        received = self.control.receive()
        return received if self._loader is None else [*received, *self._loader.receive()]

    def load(
        self, transfer: ExpectedTransfer, mm_hash: str, tensor: TensorSpec
    ) -> tuple[bytes, AnyMessage]:
        """Load an item from the store; return the first ``(identity, message)`` of that transfer.

        The entry must be the engine's item ``mm_hash`` of that shape and dtype.
        """
        if self._loader is not None:
            loading = self._loader.load(transfer.transfer_id, transfer.store, mm_hash, tensor)
            return IDENTITY, loading
        detail = f"{self._config.instance} knows of no store: give it the front's"
        nack = Nack(transfer_id=transfer.transfer_id, code=NackCode.NOT_STORED, detail=detail)
        return IDENTITY, nack

    def send(self, identity: bytes, message: AnyMessage) -> None:
        """Send a control message."""
        if identity != IDENTITY:
            self.control.send(identity, message)
        elif self._loader is not None:
            self._loader.send(message)

    def choose(self, producer: PeerDescriptor) -> PathEndpoint:
        """Return the best path from a producer, see `registry.choose`; logs refusals once."""
        if self._loader is not None and self._loader.is_its_own(producer):
            return producer.paths[0]
        choice = registry.choose(producer, self._peer)
        for refused in choice.refused:
            if (producer.session, refused.path) not in self._logged:
                if len(self._logged) >= MAX_LOGGED:
                    self._logged.clear()
                self._logged.add((producer.session, refused.path))
                names = (producer.instance, choice.endpoint.path, refused.path)
                logger.info("from %r by %s, not by %s: %r", *names, refused.reason)
        return choice.endpoint

    def verify_transfer(self, announce: Announce) -> bool:
        """Return whether the proof of an announced transfer is valid."""
        return any(
            self._secret.verify_transfer(
                announce.proof, announce.transfer_id, announce.item_uuid, address
            )
            for address in (self._config.control_address, self.control.address)
        )

    def is_gone(self, producer: PeerDescriptor) -> bool:
        """Return whether a producer's process has certainly ended."""
        return producer.host == self._peer.host and process_is_gone(producer.session)

    def close(self) -> None:
        """Stop receiving and remove the pool."""
        self._opened.close()

    def _make_loader(self, opened: contextlib.ExitStack) -> StoreLoader | None:
        section = self._config.store
        if section is None:
            return None
        loader = StoreLoader(
            make_store(section),
            Seal(self._secret),
            self._peer,
            self._namespace,
            self._memory,
            timeout_s=section.timeout_s,
            wake=self.control.wake,
        )
        opened.callback(loader.close)
        return loader

    def _open_paths(self, opened: contextlib.ExitStack) -> Iterable[PathEndpoint]:
        config = self._config
        paths = registry.offered_by(config)
        if any(path.device_memory for path in paths):
            yield from read_publication(config.pool).paths
        end = ReceivingEnd(
            memory=lambda: self._memory,
            platform=config.platform,
            host=config.host,
            data_address=config.data_address,
            fence=self.fence,
            keys=self._keys,
        )
        here = (path for path in paths if not path.device_memory)
        yield from registry.open_receivers(here, end, opened, memory=self._memory.identity)
