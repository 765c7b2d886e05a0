"""Which transfer paths there are, and which one a pair of instances takes.

A choice keeps its reasons: every better path that was not taken is named with why. A path that was
asked for is taken or refused; nothing else is taken in its place.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epd_portable.connector.pool import SHM_FOLDER
from epd_portable.connector.transport import Clock, Receiver, Transport, TransportCapabilities
from epd_portable.errors import ConfigError, NoCommonPathError
from epd_portable.platforms.traits import TRAITS
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor

AUTO = "auto"

PathChooser = Callable[[PeerDescriptor], PathEndpoint]
"""Returns the path for a producer and the consumer's address on it, or `NoCommonPathError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathEntry:
    """One transfer path.

    Attributes:
        name: Word in configuration, messages and metrics.
        transport: ``module:class`` of the encode side; imported when the path is first used.
        receiver: The same for the consumer's end, or empty if nobody is needed there.
        capabilities: See `TransportCapabilities`.
        summary: Half a sentence for people.
    """

    name: str
    transport: str
    receiver: str
    capabilities: TransportCapabilities
    summary: str


PATHS: tuple[PathEntry, ...] = (
    PathEntry(
        name="shm",
        transport="epd_portable.connector.transports.shm:ShmTransport",
        receiver="",
        capabilities=TransportCapabilities(
            same_host=True, device_memory=False, zero_copy=True, one_sided=True, fenced=False
        ),
        summary="the producer copies into the consumer's pool in /dev/shm",
    ),
    PathEntry(
        name="tcp",
        transport="epd_portable.connector.transports.tcp:TcpTransport",
        receiver="epd_portable.connector.transports.tcp:TcpReceiver",
        capabilities=TransportCapabilities(
            same_host=False, device_memory=False, zero_copy=False, one_sided=True, fenced=True
        ),
        summary="chunks over ZMQ, copied into the pool by the consumer",
    ),
)
"""Best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A path that was not taken.

    Attributes:
        path: Its name.
        reason: Why.
    """

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The path for one pair of instances.

    Attributes:
        endpoint: The path with the consumer's address.
        refused: Every better path, best first.
    """

    endpoint: PathEndpoint
    refused: tuple[Refused, ...]


def entry(name: str) -> PathEntry:
    """Return the path of that name.

    Raises:
        ConfigError: There is none.
    """
    for candidate in PATHS:
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in PATHS)
    raise ConfigError(f"transfer.path {name!r}: expected {AUTO} or one of {names}")


def load_transport(name: str, clock: Clock) -> Transport:
    """Make the encode side of a path."""
    make: Callable[[Clock], Transport] = _load(entry(name).transport)
    return make(clock)


def load_receiver(name: str) -> Callable[..., Receiver] | None:
    """Return the class of the consumer's end of a path, or ``None`` if none is needed."""
    receiver = entry(name).receiver
    return _load(receiver) if receiver else None


def fenced_paths() -> frozenset[str]:
    """Return the paths whose late writes cannot touch a slot."""
    return frozenset(path.name for path in PATHS if path.capabilities.fenced)


def allowed(asked: str) -> tuple[str, ...]:
    """Return the names of the paths that a configuration allows, best first.

    Raises:
        ConfigError: ``asked`` is neither ``auto`` nor a path.
    """
    return tuple(path.name for path in PATHS) if asked == AUTO else (entry(asked).name,)


def choose(
    producer: PeerDescriptor, consumer: PeerDescriptor, paths: Sequence[PathEntry] = PATHS
) -> Choice:
    """Return the best path that both ends offer and whose conditions hold.

    Raises:
        NoCommonPathError: Names every path with the reason against it.
    """
    offered = {endpoint.path for endpoint in producer.paths}
    receiving = {endpoint.path: endpoint for endpoint in consumer.paths}
    refused: list[Refused] = []
    for path in paths:
        if path.name not in offered:
            reason = f"not offered by {producer.instance}"
        elif path.name not in receiving:
            reason = f"not offered by {consumer.instance}"
        elif path.capabilities.same_host and producer.host != consumer.host:
            reason = f"{producer.instance} and {consumer.instance} do not share /dev/shm"
        else:
            return Choice(endpoint=receiving[path.name], refused=tuple(refused))
        refused.append(Refused(path=path.name, reason=reason))
    trace = "; ".join(f"{item.path}: {item.reason}" for item in refused)
    raise NoCommonPathError(
        f"no transfer path from {producer.instance} to {consumer.instance}: {trace}. "
        "Set transfer.path to auto, or to a path that both platforms have"
    )


def describe(platform: str) -> list[tuple[str, bool, str]]:
    """Return ``(path, usable, reason)`` for every path on a platform, for ``epd-launch check``."""
    described = []
    for path in PATHS:
        usable, reason = True, f"{path.summary}; on {platform}, {_ends(platform, path)}"
        if path.capabilities.same_host and not os.access(SHM_FOLDER, os.W_OK):
            usable, reason = False, f"{SHM_FOLDER} cannot be written"
        described.append((path.name, usable, reason))
    return described


def _ends(platform: str, path: PathEntry) -> str:
    if not TRAITS[platform].needs_device_copy:
        return "nothing is copied after that" if path.capabilities.zero_copy else "in host memory"
    return "staged through host memory at both ends"


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
