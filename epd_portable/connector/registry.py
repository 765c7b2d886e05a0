"""Which transfer paths there are, and which one a pair of instances takes.

A choice keeps its reasons: every better path that was not taken is named with why. A path that was
asked for is taken or refused; nothing else is taken in its place.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epd_portable.config import extensions
from epd_portable.connector.curve import is_off_host, may_be_plain
from epd_portable.connector.pool import SHM_FOLDER
from epd_portable.connector.transport import (
    PathReceiver,
    ReceivingEnd,
    Transport,
    TransportCapabilities,
)
from epd_portable.errors import ConfigError, NoCommonPathError
from epd_portable.platforms.traits import TRAITS
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig
    from epd_portable.connector.copies import DeviceCopies
    from epd_portable.connector.curve import CurveKeys

AUTO = extensions.AUTO

PathChooser = Callable[[PeerDescriptor], PathEndpoint]
"""Returns the path for a producer and the consumer's address on it, or `NoCommonPathError`."""


STORE = "store"
"""In place of a path's name where no instance writes an item but the store's loader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathEntry:
    """One transfer path.

    Attributes:
        name: Word in configuration, messages and metrics.
        transport: ``module:class`` of the encode side; imported when the path is first used.
        receiver: The same for the consumer's end, or empty if nobody is needed there.
        in_worker: Rank 0's worker of the consumer opens the receiving end, not its scheduler.
        capabilities: See `TransportCapabilities`.
        summary: Half a sentence for people.
        library: Module that must be installed.
        extra: Of this package, which installs it.
        system_library: What the module needs of the system, as the linker looks for it.
        protocol: Attribute of `PlatformTraits` that says by which of the library's protocols a
            platform moves bytes. Both ends must have the same.
        tried: Those of them that were run; elsewhere the path is offered only when asked for.
        before: Of a path that is not built in: the built-in one before which ``auto`` tries it.
            Without one it comes after all others.
        between_hosts: Without being asked for it is offered only by instances that other hosts can
            reach: within one host a better path is always there.
    """

    name: str
    transport: str
    receiver: str
    in_worker: bool
    capabilities: TransportCapabilities
    summary: str
    library: str = ""
    extra: str = ""
    system_library: str = ""
    protocol: str = ""
    tried: frozenset[str] = frozenset()
    between_hosts: bool = False
    before: str = ""


_BY_LIBRARY = TransportCapabilities(
    same_host=False,
    same_platform=False,
    devices_only=False,
    device_memory=False,
    zero_copy=True,
    one_sided=True,
    plain_off_host=True,
    fenced=False,
)
"""Of a library that writes into a registered pool of the consumer's."""

PATHS: tuple[PathEntry, ...] = (
    PathEntry(
        name="ipc",
        transport="epd_portable.connector.transports.ipc:IpcTransport",
        receiver="",
        in_worker=True,
        capabilities=TransportCapabilities(
            same_host=True,
            same_platform=True,
            devices_only=True,
            device_memory=True,
            zero_copy=False,
            one_sided=True,
            plain_off_host=False,
            fenced=False,
        ),
        summary="the producer's device copies into the memory of the consumer's",
    ),
    PathEntry(
        name="shm",
        transport="epd_portable.connector.transports.shm:ShmTransport",
        receiver="",
        in_worker=False,
        capabilities=TransportCapabilities(
            same_host=True,
            same_platform=False,
            devices_only=False,
            device_memory=False,
            zero_copy=True,
            one_sided=True,
            plain_off_host=False,
            fenced=False,
        ),
        summary="the producer copies into the consumer's pool in /dev/shm",
    ),
    PathEntry(
        name="nixl",
        transport="epd_portable.connector.transports.nixl:NixlTransport",
        receiver="epd_portable.connector.transports.nixl:NixlReceiver",
        in_worker=False,
        capabilities=_BY_LIBRARY,
        summary="NIXL writes into the consumer's registered pool, by RDMA where there is any",
        library="nixl",
        extra="kv",
        between_hosts=True,
    ),
    PathEntry(
        name="mooncake",
        transport="epd_portable.connector.transports.mooncake:MooncakeTransport",
        receiver="epd_portable.connector.transports.mooncake:MooncakeReceiver",
        in_worker=False,
        capabilities=_BY_LIBRARY,
        summary="Mooncake writes into the consumer's registered pool, by RDMA where there is any",
        library="mooncake",
        extra="mooncake",
        system_library="libibverbs.so.1",
        protocol="mooncake_protocol",
        # By which the engine takes TCP where there is no card.
        tried=frozenset({"rdma"}),
        between_hosts=True,
    ),
    PathEntry(
        name="collective",
        transport="epd_portable.connector.transports.collective:CollectiveTransport",
        receiver="epd_portable.connector.transports.collective_receiver:CollectiveReceiver",
        in_worker=True,
        capabilities=TransportCapabilities(
            same_host=False,
            same_platform=True,
            devices_only=False,
            device_memory=True,
            zero_copy=True,
            one_sided=False,
            plain_off_host=True,
            fenced=True,
        ),
        summary="a group of the two workers sends and receives",
    ),
    PathEntry(
        name="tcp",
        transport="epd_portable.connector.transports.tcp:TcpTransport",
        receiver="epd_portable.connector.transports.tcp:TcpReceiver",
        in_worker=False,
        capabilities=TransportCapabilities(
            same_host=False,
            same_platform=False,
            devices_only=False,
            device_memory=False,
            zero_copy=False,
            one_sided=True,
            plain_off_host=False,
            fenced=True,
        ),
        summary="chunks over ZMQ, copied into the pool by the consumer",
    ),
)
"""Those of this package, best first."""


@functools.cache
def paths() -> tuple[PathEntry, ...]:
    """Return all paths, those of installed packages too, best first.

    Raises:
        ConfigError: A package registers what cannot be loaded, or a path before one that is not
            there.
    """
    found = list(PATHS)
    for name in sorted(extensions.installed(extensions.PATHS_GROUP)):
        if name in extensions.BUILT_IN_PATHS:
            continue
        path = extensions.load(extensions.PATHS_GROUP, name, PathEntry)
        names = [each.name for each in found]
        if path.before and path.before not in names:
            raise ConfigError(
                f"transfer path {name!r} stands before {path.before!r}, which is none of "
                f"{', '.join(names)}"
            )
        found.insert(names.index(path.before) if path.before else len(found), path)
    return tuple(found)


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
    for candidate in paths():
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in paths())
    raise ConfigError(f"transfer.path {name!r}: expected {AUTO} or one of {names}")


def load_transport(name: str, copies: DeviceCopies, keys: CurveKeys) -> Transport:
    """Make the encode side of a path; ``keys`` are the deployment's."""
    make: Callable[[DeviceCopies, CurveKeys], Transport] = _load(entry(name).transport)
    return make(copies, keys)


def open_receiver(name: str, end: ReceivingEnd) -> PathReceiver | None:
    """Open the consumer's end of a path, or return ``None`` if nobody is needed there.

    Raises:
        ConfigError: There is no such path, or something that it needs is not installed.
        TransportError: An address cannot be bound.
    """
    target = entry(name).receiver
    if not target:
        return None
    receiver: type[PathReceiver] = _load(target)
    return receiver.open(end)


def paths_within_host() -> frozenset[str]:
    """Return the paths whose ends share ``/dev/shm``."""
    return frozenset(path.name for path in paths() if path.capabilities.same_host)


def fenced_paths() -> frozenset[str]:
    """Return the paths whose late writes cannot touch a slot."""
    return frozenset(path.name for path in paths() if path.capabilities.fenced)


def offered(
    asked: str, platform: str, *, plain: bool = True, off_host: bool = False
) -> tuple[PathEntry, ...]:
    """Return the paths that an instance has, best first.

    Args:
        asked: ``transfer.path``.
        platform: Of the instance.
        plain: Whether what moves may be unencrypted: nothing leaves the host, or its network is
            trusted.
        off_host: Whether other hosts can reach the instance.

    Raises:
        ConfigError: ``asked`` is neither ``auto`` nor a path, or one that the instance has not.
    """
    if asked != AUTO:
        wanted = entry(asked)
        if problem := _problem(wanted, platform) or _missing(wanted):
            raise ConfigError(f"transfer.path {asked!r}: {problem}; write {AUTO}")
        if wanted.capabilities.plain_off_host and not plain:
            raise ConfigError(
                f"transfer.path {asked!r}: it does not encrypt what leaves the host; write {AUTO} "
                "or tcp, or transfer.trusted_network: true where nobody else is on the network"
            )
        return (wanted,)
    return tuple(
        path
        for path in paths()
        if not _problem(path, platform)
        and not _missing(path)
        and not _reserve(path, platform)
        and (off_host or not path.between_hosts)
        and (plain or not path.capabilities.plain_off_host)
    )


def in_device_memory(name: str, platform: str) -> bool:
    """Tell whether slots of a path are in the slab of a consumer of that platform."""
    if name == STORE:
        return False
    return entry(name).capabilities.device_memory and TRAITS[platform].needs_device_copy


def may_use_device_memory(asked: str) -> bool:
    """Tell whether receivers keep a pool in device memory, where there is any.

    Args:
        asked: ``transfer.path``.

    Raises:
        ConfigError: There is no such path.
    """
    return asked == AUTO or entry(asked).capabilities.device_memory


def needs_devices(asked: str) -> bool:
    """Tell whether a path that was asked for opens device memory of another process.

    Args:
        asked: ``transfer.path``; ``auto`` needs nothing.

    Raises:
        ConfigError: There is no such path.
    """
    return asked != AUTO and entry(asked).capabilities.devices_only


def copies_in_place(name: str, platform: str) -> bool:
    """Tell whether a producer of that platform writes with a mere copy from host memory to another.

    Such a write waits for nobody, neither for a device nor for a peer.
    """
    path = entry(name)
    on_the_host = not (path.capabilities.devices_only or TRAITS[platform].needs_device_copy)
    return on_the_host and _is_copy(path)


def queues_copies(name: str, platform: str) -> bool:
    """Tell whether a producer of that platform writes with a mere copy that its device makes."""
    return _is_copy(entry(name)) and TRAITS[platform].needs_device_copy


def _is_copy(path: PathEntry) -> bool:
    can = path.capabilities
    return can.same_host and can.one_sided and not can.fenced


def offered_by(config: InstanceConfig) -> tuple[PathEntry, ...]:
    """Return the paths that an instance has by its configuration, see `offered`."""
    return offered(
        config.path,
        config.platform,
        plain=may_be_plain(config),
        off_host=is_off_host(config.host),
    )


def choose(
    producer: PeerDescriptor, consumer: PeerDescriptor, among: Sequence[PathEntry] | None = None
) -> Choice:
    """Return the best path that both ends offer and whose conditions hold.

    Args:
        producer: Says what it offers.
        consumer: The same.
        among: These paths only, best first; ``None`` means `paths`.

    Raises:
        NoCommonPathError: Names every path with the reason against it.
    """
    receiving = {endpoint.path: endpoint for endpoint in consumer.paths}
    refused: list[Refused] = []
    for path in paths() if among is None else among:
        reason = _reason_against(path, producer, consumer)
        if not reason:
            return Choice(endpoint=receiving[path.name], refused=tuple(refused))
        refused.append(Refused(path=path.name, reason=reason))
    trace = "; ".join(f"{item.path}: {item.reason}" for item in refused)
    raise NoCommonPathError(
        f"no transfer path from {producer.instance} to {consumer.instance}: {trace}. "
        "Set transfer.path to auto, or to a path that both platforms have"
    )


def describe(producer: str, consumer: str) -> list[tuple[str, bool, str]]:
    """Return ``(path, usable, reason)`` for every path between two platforms of this host."""
    described = []
    for path in paths():
        problem = _problem(path, producer) or _problem(path, consumer) or _missing(path)
        if not problem and path.capabilities.same_platform and producer != consumer:
            problem = f"{producer} and {consumer} are not the same platform"
        problem = problem or _ways(path, producer, consumer)
        if not problem and path.capabilities.same_host and not os.access(SHM_FOLDER, os.W_OK):
            problem = f"{SHM_FOLDER} cannot be written"
        reserve = _reserve(path, producer) or _within_host(path)
        reason = f"{path.summary}; {reserve or _copies(path, producer, consumer)}"
        described.append((path.name, not problem, problem or reason))
    return described


def _reason_against(path: PathEntry, producer: PeerDescriptor, consumer: PeerDescriptor) -> str:
    if problem := _problem(path, producer.platform) or _problem(path, consumer.platform):
        return problem
    if path.capabilities.same_platform and producer.platform != consumer.platform:
        return (
            f"{producer.instance} is on {producer.platform}, {consumer.instance} on "
            f"{consumer.platform}"
        )
    if ways := _ways(path, producer.platform, consumer.platform):
        return ways
    for end in (producer, consumer):
        if path.name not in {endpoint.path for endpoint in end.paths}:
            return _reserve(path, end.platform) or f"not offered by {end.instance}"
    if path.capabilities.same_host and producer.host != consumer.host:
        return f"{producer.instance} and {consumer.instance} do not share {SHM_FOLDER}"
    return ""


def _problem(path: PathEntry, platform: str) -> str:
    """Return why a platform does not have a path; empty if it has."""
    if platform not in TRAITS:
        return f"{platform!r} is no platform that this version knows"
    if path.capabilities.devices_only and not TRAITS[platform].needs_device_copy:
        return f"{platform} has no device memory"
    return ""


def _protocol(path: PathEntry, platform: str) -> str:
    return getattr(TRAITS[platform], path.protocol) if path.protocol else ""


def _ways(path: PathEntry, producer: str, consumer: str) -> str:
    """Return why a path's library does not connect two platforms; empty if it does."""
    sends, receives = _protocol(path, producer), _protocol(path, consumer)
    if sends == receives:
        return ""
    library = path.library.capitalize()
    return f"{producer} sends by {library}'s protocol {sends}, {consumer} receives by {receives}"


def _missing(path: PathEntry) -> str:
    """Return why this environment does not have a path; empty if it has."""
    if path.library and importlib.util.find_spec(path.library) is None:
        what = f"epd-portable[{path.extra}]" if path.extra else "it"
        return f"{path.library} is not installed: install {what}"
    if path.system_library:
        try:
            ctypes.CDLL(path.system_library)
        except OSError:
            package = path.system_library.replace(".so.", "")
            return f"{path.library} needs {path.system_library}: install {package}"
    return ""


def _within_host(path: PathEntry) -> str:
    """Return who offers a path without being asked; empty if everybody does."""
    return "between hosts, or when asked for" if path.between_hosts else ""


def _reserve(path: PathEntry, platform: str) -> str:
    """Return why a platform offers a path only to who asks for it; empty if it always does."""
    if not path.capabilities.one_sided and not TRAITS[platform].needs_device_copy:
        return f"on {platform} only when asked for: without device memory tcp does, and encrypts"
    if path.protocol and _protocol(path, platform) not in path.tried:
        return f"on {platform} only when asked for: it was never run there"
    return ""


def _copies(path: PathEntry, producer: str, consumer: str) -> str:
    """Say where the bytes pass through the host."""
    ends = {
        word: TRAITS[platform].needs_device_copy
        for word, platform in (("from", producer), ("to", consumer))
    }
    if not any(ends.values()):
        return "nothing is copied after that" if path.capabilities.zero_copy else "in host memory"
    if path.capabilities.device_memory:
        return "device memory only"
    copies = " and ".join(f"one {word} the device" for word, device in ends.items() if device)
    return f"copies: {copies}"


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
