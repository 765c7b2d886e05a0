"""Table of transfer paths, and the choice of one for a pair of instances.

A choice names every better path that was refused, with its reason. A path that was requested is
taken or refused; no other is taken in its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epd_portable.config.instance import AUTO
from epd_portable.errors import ConfigError, NoCommonPathError
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.curve import is_off_host, may_be_plain
from epd_portable.transfer.paths.base import (
    PathReceiver,
    PathWriter,
    ReceivingEnd,
)
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig
    from epd_portable.transfer.copies import DeviceCopies
    from epd_portable.transfer.curve import CurveKeys

STORE = "store"
"""Stands for a path's name where the store's loader writes an item."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathEntry:
    """A transfer path and its capabilities, known without loading it.

    Attributes:
        name: In configuration, messages and metrics.
        writer: ``module:class`` of the encode side; imported when the path is first used.
        receiver: The same for the consumer's end; empty if none is needed.
        summary: Half a sentence.
        same_host: Both ends must share ``/dev/shm``.
        device_memory: Slots are in device memory, on platforms that have any, and both ends are
            devices of one platform. Rank 0's worker of the consumer opens the receiving end, not
            its scheduler.
        zero_copy: On CPU the injected tensor is the written memory itself.
        plain_off_host: Bytes between hosts are not encrypted.
        fenced: A write after the end of its lease cannot touch the slot: the consumer's own process
            does the last step.
        library: Module that must be installed. Such a path is offered without being requested only
            by instances that other hosts can reach: within one host there is always a better path.
        extra: Extra of this package that installs the library.
    """

    name: str
    writer: str
    receiver: str = ""
    summary: str
    same_host: bool = False
    device_memory: bool = False
    zero_copy: bool = False
    plain_off_host: bool = False
    fenced: bool = False
    library: str = ""
    extra: str = ""

    @property
    def devices_only(self) -> bool:
        """Return whether both ends must have device memory, because one opens that of the other."""
        return self.same_host and self.device_memory

    @property
    def one_sided(self) -> bool:
        """Return whether the consumer's workers take no part in the transfer."""
        return self.same_host or not self.device_memory


_PATHS = "epd_portable.transfer.paths"

PATHS: tuple[PathEntry, ...] = (
    PathEntry(
        name="ipc",
        writer=f"{_PATHS}.mapped:IpcWriter",
        same_host=True,
        device_memory=True,
        summary="the producer's device copies into the memory of the consumer's",
    ),
    PathEntry(
        name="shm",
        writer=f"{_PATHS}.mapped:ShmWriter",
        same_host=True,
        zero_copy=True,
        summary="the producer copies into the consumer's pool in /dev/shm",
    ),
    PathEntry(
        name="nixl",
        writer=f"{_PATHS}.nixl:NixlWriter",
        receiver=f"{_PATHS}.nixl:NixlReceiver",
        zero_copy=True,
        plain_off_host=True,
        summary="NIXL writes into the consumer's registered pool, by RDMA where there is any",
        library="nixl",
        extra="kv",
    ),
    PathEntry(
        name="collective",
        writer=f"{_PATHS}.collective:CollectiveWriter",
        receiver=f"{_PATHS}.collective:CollectiveReceiver",
        device_memory=True,
        zero_copy=True,
        plain_off_host=True,
        fenced=True,
        summary="a group of the two workers sends and receives",
    ),
    PathEntry(
        name="tcp",
        writer=f"{_PATHS}.tcp:TcpWriter",
        receiver=f"{_PATHS}.tcp:TcpReceiver",
        fenced=True,
        summary="chunks over ZMQ, copied into the pool by the consumer",
    ),
)
"""Every transfer path, best first."""


def entry(name: str) -> PathEntry:
    """Return the path of that name; `ConfigError` if there is none."""
    for candidate in PATHS:
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in PATHS)
    raise ConfigError(f"transfer.path {name!r}: expected {AUTO} or one of {names}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A path that was not taken."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The path for a pair of instances, with the consumer's address, and every better one."""

    endpoint: PathEndpoint
    refused: tuple[Refused, ...]


def load_writer(name: str, copies: DeviceCopies, keys: CurveKeys) -> PathWriter:
    """Make the encode side of a path."""
    make: Callable[[DeviceCopies, CurveKeys], PathWriter] = _load(entry(name).writer)
    return make(copies, keys)


def open_receivers(
    paths: Iterable[PathEntry], end: ReceivingEnd, opened: ExitStack, *, memory: str
) -> Iterator[PathEndpoint]:
    """Open the consumer's end of paths, see `PathReceiver`, until ``opened`` is closed.

    Args:
        memory: Address of the memory, for paths that need no receiver.
    """
    for path in paths:
        address = memory
        if path.receiver:
            receiver: PathReceiver = _load(path.receiver)(end)
            opened.callback(receiver.close)
            address = receiver.address
        yield PathEndpoint(path=path.name, address=address)


def paths_within_host() -> frozenset[str]:
    """Return the paths whose ends share ``/dev/shm``."""
    return frozenset(path.name for path in PATHS if path.same_host)


def fenced_paths() -> frozenset[str]:
    """Return the paths whose late writes cannot touch a slot."""
    return frozenset(path.name for path in PATHS if path.fenced)


def in_device_memory(name: str, platform: str) -> bool:
    """Return whether slots of a path are in the slab of a consumer of that platform."""
    if name == STORE:
        return False
    return entry(name).device_memory and TRAITS[platform].needs_device_copy


def may_use_device_memory(asked: str) -> bool:
    """Return whether receivers keep a pool in device memory with this ``transfer.path``."""
    return asked == AUTO or entry(asked).device_memory


def needs_devices(asked: str) -> bool:
    """Return whether ``transfer.path`` names a path that opens another process's device memory."""
    return asked != AUTO and entry(asked).devices_only


def copies_in_place(name: str, platform: str) -> bool:
    """Return whether a producer writes with a copy in host memory, which waits for nothing."""
    path = entry(name)
    on_host = not (path.devices_only or TRAITS[platform].needs_device_copy)
    return on_host and path.same_host


def queues_copies(name: str, platform: str) -> bool:
    """Return whether a producer writes with a copy that its device makes asynchronously."""
    return entry(name).same_host and TRAITS[platform].needs_device_copy


def offered(
    asked: str, platform: str, *, plain: bool = True, off_host: bool = False
) -> tuple[PathEntry, ...]:
    """Return the paths that an instance has, best first.

    Args:
        requested: ``transfer.path``.
        plain: Payloads may be unencrypted: they stay on the host, or its network is trusted.
        off_host: Other hosts can reach the instance.

    Raises:
        ConfigError: ``asked`` is neither ``auto`` nor a path, or one that the instance has not.
    """
    if asked != AUTO:
        wanted = entry(asked)
        if problem := _problem(wanted, platform) or missing(wanted):
            raise ConfigError(f"transfer.path {asked!r}: {problem}; write {AUTO}")
        if wanted.plain_off_host and not plain:
            raise ConfigError(
                f"transfer.path {asked!r}: it does not encrypt what leaves the host; write {AUTO} "
                "or tcp, or transfer.trusted_network: true where the network is private"
            )
        return (wanted,)
    return tuple(
        path
        for path in PATHS
        if not _problem(path, platform)
        and not missing(path)
        and not _reserved(path, platform)
        and (off_host or not path.library)
        and (plain or not path.plain_off_host)
    )


def offered_by(config: InstanceConfig) -> tuple[PathEntry, ...]:
    """Return the paths that an instance has by its configuration, see `offered`."""
    off_host = is_off_host(config.host)
    return offered(config.path, config.platform, plain=may_be_plain(config), off_host=off_host)


def choose(
    producer: PeerDescriptor, consumer: PeerDescriptor, among: Sequence[PathEntry] | None = None
) -> Choice:
    """Return the best path that both ends offer and whose conditions hold.

    Args:
        among: Candidates, best first; default: `PATHS`.

    Raises:
        NoCommonPathError: Names every path with the reason against it.
    """
    receiving = {endpoint.path: endpoint for endpoint in consumer.paths}
    refused: list[Refused] = []
    for path in PATHS if among is None else among:
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
    for path in PATHS:
        problem = _problem_between(path, producer, consumer) or missing(path)
        if not problem and path.same_host and not os.access(SHM_FOLDER, os.W_OK):
            problem = f"{SHM_FOLDER} cannot be written"
        remark = _reserved(path, producer)
        if not remark and path.library:
            remark = "between hosts, or when configured"
        reason = f"{path.summary}; {remark or _copies(path, producer, consumer)}"
        described.append((path.name, not problem, problem or reason))
    return described


# Each returns a reason for people, or an empty string.


def _reason_against(path: PathEntry, producer: PeerDescriptor, consumer: PeerDescriptor) -> str:
    names = (producer.instance, consumer.instance)
    if problem := _problem_between(path, producer.platform, consumer.platform, names):
        return problem
    for end in (producer, consumer):
        if path.name not in {endpoint.path for endpoint in end.paths}:
            return _reserved(path, end.platform) or f"not offered by {end.instance}"
    if path.same_host and producer.host != consumer.host:
        return f"{producer.instance} and {consumer.instance} do not share {SHM_FOLDER}"
    return ""


def _problem(path: PathEntry, platform: str) -> str:
    """Return the reason for which a platform does not have a path."""
    if platform not in TRAITS:
        return f"{platform!r} is no platform that this version knows"
    if path.devices_only and not TRAITS[platform].needs_device_copy:
        return f"{platform} has no device memory"
    return ""


def _problem_between(
    path: PathEntry,
    producer: str,
    consumer: str,
    names: tuple[str, str] = ("the encode side", "the other"),
) -> str:
    """Return the reason for which a path does not connect two platforms."""
    if problem := _problem(path, producer) or _problem(path, consumer):
        return problem
    if path.device_memory and producer != consumer:
        return f"{names[0]} is on {producer}, {names[1]} on {consumer}"
    return ""


def missing(path: PathEntry) -> str:
    """Return the reason for which this environment does not have a path."""
    if path.library and importlib.util.find_spec(path.library) is None:
        return f"{path.library} is not installed: install epd-portable[{path.extra}]"
    return ""


def _reserved(path: PathEntry, platform: str) -> str:
    """Return the reason for which a platform offers a path only by configuration."""
    if not path.one_sided and not TRAITS[platform].needs_device_copy:
        return f"on {platform} only when configured: without device memory tcp does, and encrypts"
    return ""


def _copies(path: PathEntry, producer: str, consumer: str) -> str:
    """Return the place at which bytes pass through the host."""
    ends = {
        word: TRAITS[platform].needs_device_copy
        for word, platform in (("from", producer), ("to", consumer))
    }
    if not any(ends.values()):
        return "nothing is copied after that" if path.zero_copy else "in host memory"
    if path.device_memory:
        return "device memory only"
    copies = " and ".join(f"one {word} the device" for word, device in ends.items() if device)
    return f"copies: {copies}"


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
