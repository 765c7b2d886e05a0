"""Which devices or CPU cores each instance runs on. Pure: what the machine has is an argument."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from epd_portable.config.groups import InstanceGroup
from epd_portable.config.roles import ROLES, Role, group_of
from epd_portable.config.schema import Topology
from epd_portable.config.transfer import AUTO
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.transfer import registry

T = TypeVar("T")

Cores = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlacement:
    """An instance, and where it runs.

    Attributes:
        name: For example ``encode-0``; of one that joins a front with its launcher's behind it.
        devices: One device per rank; empty where the platform has no numbered devices.
        peers: Devices of other instances that it must see as well, behind its own.
        cores: The CPU cores of each rank; empty where ranks are not bound to cores.
    """

    name: str
    role: Role
    devices: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """All instances, by role.

    Attributes:
        rest: CPU cores that no instance has, where they are bound to cores.
    """

    instances: tuple[InstancePlacement, ...]
    warnings: tuple[str, ...] = ()
    rest: Cores = ()


def place_instances(
    topology: Topology,
    traits: PlatformTraits,
    *,
    devices: Sequence[str] | None,
    cores: Sequence[int],
) -> Placements:
    """Give every instance devices, if these are known, or some of the CPU cores.

    Raises:
        ConfigError: The topology does not fit the platform or the machine.
    """
    path = topology.transfer.path
    needs_devices = registry.needs_devices(path)
    if needs_devices and not traits.needs_device_copy:
        raise ConfigError(
            f"transfer.path: {path} writes into the memory of a device, and devices of platform "
            f"{traits.name} have none of their own; write auto or shm"
        )
    groups = {role: topology.instances.of(role) for role in ROLES}
    numbered = traits.visible_devices_env is not None
    refused = "cores" if numbered else "devices"
    for role, group in groups.items():
        if getattr(group, refused) is not None:
            raise ConfigError(
                f"instances.{group_of(role)}.{refused}: platform {traits.name} has no use for it; "
                "move it under platform.<name> of the platform that it is meant for"
            )
    # The list of a group without instances is for where they are started.
    groups = {role: group for role, group in groups.items() if group.count}
    placed = place_on_devices(groups, devices) if numbered else place_on_cores(groups, cores)
    instances = placed.instances
    if traits.peers_must_be_visible and (path == AUTO or needs_devices):
        visible = dict.fromkeys(device for each in instances for device in each.devices)
        instances = tuple(
            replace(each, peers=tuple(one for one in visible if one not in each.devices))
            for each in instances
        )
    if topology.launch.join:
        launcher = topology.launch.name or topology.launch.host
        instances = tuple(replace(each, name=f"{each.name}@{launcher}") for each in instances)
    return replace(placed, instances=instances)


def ranks_of(group: InstanceGroup) -> int:
    """Return how many ranks a group has in all."""
    return group.count * group.tensor_parallel_size


def place_on_devices(
    groups: Mapping[Role, InstanceGroup], available: Sequence[str] | None
) -> Placements:
    """Give every rank a device.

    Groups with a ``devices`` list keep to it; the others share out what no list names, each device
    once. With ``available`` unknown (``None``) there are as many as are wanted.

    Raises:
        ConfigError: More devices are wanted than there are, a list names one that is not here, or
            a list has the wrong length.
    """
    listed: list[str] = []
    for role, group in groups.items():
        if group.devices is not None:
            _check_devices(role, group, group.devices, available)
            listed += group.devices
    unlisted = {role: group for role, group in groups.items() if group.devices is None}
    wanted = sum(map(ranks_of, unlisted.values()))
    if available is None:
        available = [str(index) for index in range(wanted + len(listed))]
    free = [device for device in available if device not in listed]
    if wanted > len(free):
        terms = " + ".join(
            f"{group_of(role)} {group.count} × {group.tensor_parallel_size}"
            for role, group in unlisted.items()
        )
        left = f"{len(free)} of {len(available)} (the others are listed)" if listed else len(free)
        raise ConfigError(
            f"the topology wants {wanted} devices ({terms}) and there are {left}; lower count or "
            "tensor_parallel_size, or let instances share devices by listing them in "
            "instances.*.devices"
        )
    supply = iter(free)
    placed = (
        InstancePlacement(name=name, role=role, devices=own)
        for role, group in groups.items()
        for name, own in _by_instance(
            role, group, group.devices or [*itertools.islice(supply, ranks_of(group))]
        )
    )
    return Placements(instances=tuple(placed))


def _check_devices(
    role: Role, group: InstanceGroup, devices: Sequence[str], available: Sequence[str] | None
) -> None:
    key, width = f"instances.{group_of(role)}.devices", group.tensor_parallel_size
    if len(devices) != ranks_of(group):
        raise ConfigError(
            f"{key}: {len(devices)} devices for count {group.count} × tensor_parallel_size "
            f"{width}; list {ranks_of(group)}"
        )
    if any(len(set(own)) < width for _, own in _by_instance(role, group, devices)):
        raise ConfigError(f"{key}: one instance needs {width} different devices")
    for device in devices:
        if available is not None and device not in available:
            raise ConfigError(
                f"{key}: device {device} is not here; there are {', '.join(available) or 'none'}"
            )


def _by_instance(
    role: Role, group: InstanceGroup, ranks: Sequence[T]
) -> Iterator[tuple[str, tuple[T, ...]]]:
    """Yield the name of each instance of a group, and what its ranks have."""
    width = group.tensor_parallel_size
    for index in range(group.count):
        yield f"{group_of(role)}-{index}", tuple(ranks[index * width : (index + 1) * width])


def place_on_cores(groups: Mapping[Role, InstanceGroup], allowed: Sequence[int]) -> Placements:
    """Give every rank CPU cores of its own, the same number to all that no list is for.

    With fewer cores than ranks, and no list, no rank is bound: one that waits for another spins,
    and on the same core it would keep from running what it waits for.

    Raises:
        ConfigError: A ``cores`` list names a core that is not ``allowed``.
    """
    warnings: list[str] = []
    listed: set[int] = set()
    for role, group in groups.items():
        own = set(group.cores or ())
        if outside := sorted(own.difference(allowed)):
            raise ConfigError(
                f"instances.{group_of(role)}.cores: core {outside[0]} is not among the cores that "
                f"this process may use ({_ranges(allowed)})"
            )
        if again := sorted(listed & own):
            warnings.append(f"core {again[0]} is in the list of more than one group: they share it")
        listed |= own
    ranks = sum(map(ranks_of, groups.values()))
    bound: dict[Role, list[Cores]] = {role: [] for role in groups}
    if not listed and len(allowed) < ranks:
        unbound = (
            f"the topology has {ranks} ranks for {len(allowed)} CPU cores "
            f"({_ranges(allowed)}): none is bound to a core, and they slow each other down"
        )
        return Placements(instances=tuple(_on_cores(groups, bound)), warnings=(unbound,))
    rest = sorted(set(allowed) - listed)
    unlisted = [group for group in groups.values() if group.cores is None]
    if unlisted and not rest:
        warnings.append("the lists take every core: groups without a list share those cores")
        rest = sorted(allowed)
    shares = iter(_split(rest, sum(map(ranks_of, unlisted)), "the rest of the topology", warnings))
    for role, group in groups.items():
        owner = f"instances.{group_of(role)}"
        if group.cores is None:
            bound[role] = [*itertools.islice(shares, ranks_of(group))]
        else:
            bound[role] = _split(sorted(set(group.cores)), ranks_of(group), owner, warnings)
    placed = [*_on_cores(groups, bound)]
    left = tuple(sorted(set(allowed).difference(*(rank for each in placed for rank in each.cores))))
    return Placements(instances=tuple(placed), warnings=tuple(warnings), rest=left)


def _on_cores(
    groups: Mapping[Role, InstanceGroup], bound: Mapping[Role, Sequence[Cores]]
) -> Iterator[InstancePlacement]:
    for role, group in groups.items():
        for name, own in _by_instance(role, group, bound[role]):
            yield InstancePlacement(name=name, role=role, cores=own)


def _split(cores: list[int], ranks: int, owner: str, warnings: list[str]) -> list[Cores]:
    if ranks and len(cores) < ranks:
        warnings.append(
            f"{owner} has {ranks} ranks for {len(cores)} CPU cores ({_ranges(cores)}): "
            "some share a core and slow each other down"
        )
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    each = len(cores) // max(ranks, 1)
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def cores_of(placed: Iterable[InstancePlacement], *, of_encoders: bool) -> Cores:
    """Return the cores that the ranks of encode instances are bound to, or of all others."""
    chosen = (each for each in placed if (each.role == "encode") == of_encoders)
    return tuple(sorted({core for each in chosen for rank in each.cores for core in rank}))


def _ranges(cores: Sequence[int]) -> str:
    """Write cores the way Linux does: ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
