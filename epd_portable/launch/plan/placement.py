"""Which devices or CPU cores each instance runs on. Pure: what the machine has is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from epd_portable.config.groups import InstanceGroup, Instances
from epd_portable.config.schema import Topology
from epd_portable.connector import registry
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import PlatformTraits

T = TypeVar("T")

Cores = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlacement:
    """Where one instance runs.

    Attributes:
        devices: One device per rank; empty where the platform has no numbered devices.
        peers: Devices of other instances that it must see as well, behind its own.
        cores: The CPU cores of each rank; empty where ranks are not bound to cores.
        api_cores: Further cores of its API server, see `_with_api_cores`.
    """

    devices: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()
    api_cores: Cores = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """Where all instances run.

    Attributes:
        groups: The instances of each group, by the group's name.
        rest: CPU cores that no instance has, where they are bound to cores.
    """

    groups: dict[str, list[InstancePlacement]]
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
    groups = {name: getattr(topology.instances, name) for name in Instances.model_fields}
    numbered = traits.visible_devices_env is not None
    refused = "cores" if numbered else "devices"
    for name, group in groups.items():
        if getattr(group, refused) is not None:
            raise ConfigError(
                f"instances.{name}.{refused}: platform {traits.name} has no use for it; move it "
                "under platform.<name> of the platform that it is meant for"
            )
        if not group.count:  # Its list is for where it is started.
            groups[name] = group.model_copy(update={"devices": None, "cores": None})
    if not numbered:
        return place_on_cores(groups, cores)
    placed = place_on_devices(groups, devices)
    if traits.peers_must_be_visible and (path == registry.AUTO or needs_devices):
        every = (each.devices for instances in placed.values() for each in instances)
        visible = dict.fromkeys(device for own in every for device in own)
        placed = {
            name: [
                replace(each, peers=tuple(one for one in visible if one not in each.devices))
                for each in instances
            ]
            for name, instances in placed.items()
        }
    return Placements(groups=placed)


def ranks_of(group: InstanceGroup) -> int:
    """Return how many ranks a group has in all."""
    return group.count * group.tensor_parallel_size


def place_on_devices(
    groups: Mapping[str, InstanceGroup], available: Sequence[str] | None
) -> dict[str, list[InstancePlacement]]:
    """Give every rank a device.

    Groups with a ``devices`` list keep to it; the others share out what no list names, each device
    once. With ``available`` unknown (``None``) there are as many as are wanted.

    Raises:
        ConfigError: More devices are wanted than there are, a list names one that is not here, or
            a list has the wrong length.
    """
    listed: list[str] = []
    for name, group in groups.items():
        if group.devices is not None:
            _check_devices(f"instances.{name}.devices", group, group.devices, available)
            listed += group.devices
    unlisted = {name: group for name, group in groups.items() if group.devices is None}
    wanted = sum(map(ranks_of, unlisted.values()))
    if available is None:
        available = [str(index) for index in range(wanted + len(listed))]
    free = [device for device in available if device not in listed]
    if wanted > len(free):
        terms = " + ".join(
            f"{name} {group.count} × {group.tensor_parallel_size}"
            for name, group in unlisted.items()
            if group.count
        )
        left = f"{len(free)} of {len(available)} (the others are listed)" if listed else len(free)
        raise ConfigError(
            f"the topology wants {wanted} devices ({terms}) and there are {left}; lower count or "
            "tensor_parallel_size, or let instances share devices by listing them in "
            "instances.*.devices"
        )
    supply = iter(free)
    return {
        name: [
            InstancePlacement(devices=own)
            for own in _by_instance(
                group, group.devices or [next(supply) for _ in range(ranks_of(group))]
            )
        ]
        for name, group in groups.items()
    }


def _check_devices(
    key: str, group: InstanceGroup, devices: Sequence[str], available: Sequence[str] | None
) -> None:
    width = group.tensor_parallel_size
    if len(devices) != ranks_of(group):
        raise ConfigError(
            f"{key}: {len(devices)} devices for count {group.count} × tensor_parallel_size "
            f"{width}; list {ranks_of(group)}"
        )
    if any(len(set(own)) < width for own in _by_instance(group, devices)):
        raise ConfigError(f"{key}: one instance needs {width} different devices")
    for device in devices:
        if available is not None and device not in available:
            raise ConfigError(
                f"{key}: device {device} is not here; there are {', '.join(available) or 'none'}"
            )


def _by_instance(group: InstanceGroup, flat: Sequence[T]) -> list[tuple[T, ...]]:
    width = group.tensor_parallel_size
    return [tuple(flat[begin : begin + width]) for begin in range(0, len(flat), width)]


def place_on_cores(groups: Mapping[str, InstanceGroup], allowed: Sequence[int]) -> Placements:
    """Give every rank CPU cores of its own, the same number to all that no list is for.

    With fewer cores than ranks, and no list, no rank is bound: one that waits for another spins,
    and on the same core it would keep from running what it waits for.

    Raises:
        ConfigError: A ``cores`` list names a core that is not ``allowed``.
    """
    warnings: list[str] = []
    listed: set[int] = set()
    for name, group in groups.items():
        own = set(group.cores or ())
        if outside := sorted(own.difference(allowed)):
            raise ConfigError(
                f"instances.{name}.cores: core {outside[0]} is not among the cores that this "
                f"process may use ({_ranges(allowed)})"
            )
        if again := sorted(listed & own):
            warnings.append(f"core {again[0]} is in the list of more than one group: they share it")
        listed |= own
    ranks = sum(map(ranks_of, groups.values()))
    if not listed and len(allowed) < ranks:
        unbound = (
            f"the topology has {ranks} ranks for {len(allowed)} CPU cores "
            f"({_ranges(allowed)}): none is bound to a core, and they slow each other down"
        )
        return Placements(
            groups={name: [InstancePlacement()] * group.count for name, group in groups.items()},
            warnings=(unbound,),
        )
    rest = sorted(set(allowed) - listed)
    unlisted = [group for group in groups.values() if group.cores is None]
    if unlisted and not rest:
        warnings.append("the lists take every core: groups without a list share those cores")
        rest = sorted(allowed)
    shares = iter(_split(rest, sum(map(ranks_of, unlisted)), "the rest of the topology", warnings))
    placed: dict[str, list[InstancePlacement]] = {}
    for name, group in groups.items():
        if group.cores is None:
            flat = [next(shares) for _ in range(ranks_of(group))]
        else:
            flat = _split(sorted(set(group.cores)), ranks_of(group), f"instances.{name}", warnings)
        placed[name] = [InstancePlacement(cores=own) for own in _by_instance(group, flat)]
    left = tuple(sorted(set(allowed) - _cores_of(each for one in placed.values() for each in one)))
    return Placements(groups=_with_api_cores(placed, left), warnings=tuple(warnings), rest=left)


def _split(cores: list[int], ranks: int, owner: str, warnings: list[str]) -> list[Cores]:
    if ranks and len(cores) < ranks:
        warnings.append(
            f"{owner} has {ranks} ranks for {len(cores)} CPU cores ({_ranges(cores)}): "
            "some share a core and slow each other down"
        )
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    each = len(cores) // max(ranks, 1)
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _with_api_cores(
    placed: Mapping[str, list[InstancePlacement]], rest: Cores
) -> dict[str, list[InstancePlacement]]:
    """Let API servers use the cores that are left, and those of encoders.

    While a step computes, nothing else should run on its cores: every token waits for it. An
    encoder's cores rest between pictures, and what comes late there makes one picture late.
    """
    encoders = _cores_of(placed["encode"])
    result = {}
    for name, instances in placed.items():
        more = {*rest} if name == "encode" else {*rest, *encoders}
        result[name] = [
            replace(each, api_cores=tuple(sorted(more.difference(*each.cores))))
            for each in instances
        ]
    return result


def _cores_of(placements: Iterable[InstancePlacement]) -> set[int]:
    return {core for each in placements for rank in each.cores for core in rank}


def core_warnings(
    bound: Mapping[str, tuple[Sequence[Cores], int]],
    *,
    quota_cores: float | None,
    nodes: Sequence[Cores],
) -> list[str]:
    """Return what is wrong with cores that ranks were given; see `Machine` of the limits.

    ``bound`` has by instance the cores of each of its ranks, and how many threads each rank has.
    """
    warnings = []
    for name, (ranks, threads) in bound.items():
        for own in ranks:
            if threads > len(own):
                warnings.append(
                    f"{name}: {threads} threads on {len(own)} CPU cores ({_ranges(own)}) slow each "
                    "other down: lower OMP_NUM_THREADS in env, or leave it out"
                )
            if sum(not set(node).isdisjoint(own) for node in nodes) > 1:
                warnings.append(
                    f"{name}: its CPU cores ({_ranges(own)}) are of several memory nodes, "
                    f"{'; '.join(map(_ranges, nodes))}: list instances.*.cores by node"
                )
    used = {core for ranks, _ in bound.values() for own in ranks for core in own}
    if quota_cores is not None and quota_cores < len(used):
        warnings.append(
            f"this container may take the time of {quota_cores:g} CPU cores, and instances are "
            f"bound to {len(used)}: they are stopped in the middle of steps; raise its limit "
            "(docker run --cpus), or list fewer cores"
        )
    return warnings


def _ranges(cores: Sequence[int]) -> str:
    """Write cores the way Linux does: ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
