"""Which devices or CPU cores each instance runs on. Pure: what the machine has is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        port: Its HTTP port.
        devices: One device per rank; empty where the platform has no numbered devices.
        peers: Devices of other instances that it must see as well, behind its own.
        cores: The CPU cores of each rank; empty where ranks are not bound to cores.
        api_cores: Further cores of its API server, see `_api_cores`.
    """

    port: int
    devices: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()
    api_cores: Cores = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyPlacement:
    """Where all instances run.

    Attributes:
        groups: The placements of each group's instances, by the group's name.
        rest: CPU cores that no instance has, where they are bound to cores.
    """

    groups: dict[str, list[InstancePlacement]]
    warnings: tuple[str, ...] = ()
    rest: Cores = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreAssignment:
    """CPU cores of every instance.

    Attributes:
        cores: For each group, for each of its instances, the cores of each rank; nothing for one
            whose ranks are not bound.
        rest: Cores that no rank has.
    """

    cores: dict[str, list[tuple[Cores, ...]]]
    warnings: tuple[str, ...]
    rest: Cores = ()


def place_instances(
    topology: Topology,
    traits: PlatformTraits,
    *,
    devices: Sequence[str] | None,
    cores: Sequence[int],
    free_port: Callable[[], int],
) -> TopologyPlacement:
    """Give every instance a port, and devices or cores.

    Args:
        topology: Checked configuration of the chosen platform.
        traits: The chosen platform.
        devices: Devices of this machine; ``None`` when they are not known.
        cores: CPU cores that this process may use.
        free_port: Returns one free port after another.

    Raises:
        ConfigError: The topology does not fit the platform or the machine.
    """
    path = topology.transfer.path
    if registry.needs_devices(path) and not traits.needs_device_copy:
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
    if not numbered:
        assigned = assign_cores(groups, cores)
        placed = {
            name: [
                InstancePlacement(
                    port=free_port(), cores=own, api_cores=_api_cores(assigned, name, own)
                )
                for own in instances
            ]
            for name, instances in assigned.cores.items()
        }
        return TopologyPlacement(groups=placed, warnings=assigned.warnings, rest=assigned.rest)
    by_group = assign_devices(groups, devices)
    visible: list[str] = []
    if traits.peers_must_be_visible and (path == registry.AUTO or registry.needs_devices(path)):
        every = (device for group in by_group.values() for own in group for device in own)
        visible = list(dict.fromkeys(every))
    return TopologyPlacement(
        groups={
            name: [
                InstancePlacement(
                    port=free_port(),
                    devices=own,
                    peers=tuple(device for device in visible if device not in own),
                )
                for own in instances
            ]
            for name, instances in by_group.items()
        }
    )


def _api_cores(assigned: CoreAssignment, name: str, own: Sequence[Cores]) -> Cores:
    """Return the cores that an instance's API server may use beside the instance's own.

    While a step computes, nothing else should run on its cores: every token waits for it. An
    encoder's cores rest between pictures, and what comes late there makes one picture late.
    """
    if not any(own):
        return ()
    encoders = assigned.cores["encode"] if name != "encode" else []
    more = {core for instance in encoders for rank in instance for core in rank}
    return tuple(sorted({*more, *assigned.rest}.difference(*own)))


def ranks_of(group: InstanceGroup) -> int:
    """Return how many ranks a group has in all."""
    return group.count * group.tensor_parallel_size


def assign_devices(
    groups: Mapping[str, InstanceGroup], available: Sequence[str] | None
) -> dict[str, list[tuple[str, ...]]]:
    """Return for each group, for each of its instances, one device per rank.

    Groups with a ``devices`` list keep to it; the others share out what no list names, each device
    once. With ``available`` unknown (``None``) there are as many as are wanted.

    Raises:
        ConfigError: More devices are wanted than there are, a list names one that is not here, or
            a list has the wrong length.
    """
    listed: list[str] = []
    for name, group in groups.items():
        if group.devices is not None:
            _check_list(name, group, group.devices, available)
            listed += group.devices
    wanted = sum(ranks_of(group) for group in groups.values() if group.devices is None)
    if available is None:
        available = [str(index) for index in range(wanted + len(listed))]
    free = [device for device in available if device not in listed]
    if wanted > len(free):
        raise _too_few(groups, wanted=wanted, free=len(free), total=len(available))
    supply = iter(free)
    return {
        name: _by_instance(group, group.devices or [next(supply) for _ in range(ranks_of(group))])
        for name, group in groups.items()
    }


def _by_instance(group: InstanceGroup, flat: Sequence[T]) -> list[tuple[T, ...]]:
    width = group.tensor_parallel_size
    return [tuple(flat[begin : begin + width]) for begin in range(0, len(flat), width)]


def assign_cores(groups: Mapping[str, InstanceGroup], allowed: Sequence[int]) -> CoreAssignment:
    """Give every rank CPU cores of its own, the same number to all that no list is for.

    With fewer cores than ranks, and no list, no rank is bound: one that waits for another spins,
    and on the same core it would keep from running what it waits for.

    Raises:
        ConfigError: A ``cores`` list names a core that is not ``allowed``.
    """
    warnings: list[str] = []
    listed: set[int] = set()
    for name, group in groups.items():
        outside = sorted(set(group.cores or ()) - set(allowed))
        if outside:
            raise ConfigError(
                f"instances.{name}.cores: core {outside[0]} is not among the cores that this "
                f"process may use ({_ranges(allowed)})"
            )
        again = sorted(listed & set(group.cores or ()))
        if again:
            warnings.append(f"core {again[0]} is in the list of more than one group: they share it")
        listed |= set(group.cores or ())
    ranks = sum(map(ranks_of, groups.values()))
    if not listed and len(allowed) < ranks:
        return CoreAssignment(
            cores={name: [()] * group.count for name, group in groups.items()},
            warnings=(
                f"the topology has {ranks} ranks for {len(allowed)} CPU cores "
                f"({_ranges(allowed)}): none is bound to a core, and they slow each other down",
            ),
        )
    rest = [core for core in sorted(allowed) if core not in listed]
    unlisted = [group for group in groups.values() if group.cores is None]
    if unlisted and not rest:
        warnings.append("the lists take every core: groups without a list share those cores")
        rest = sorted(allowed)
    shares = iter(_split(rest, sum(map(ranks_of, unlisted)), "the rest of the topology", warnings))
    result: dict[str, list[tuple[Cores, ...]]] = {}
    for name, group in groups.items():
        if group.cores is None:
            flat = [next(shares) for _ in range(ranks_of(group))]
        else:
            flat = _split(sorted(set(group.cores)), ranks_of(group), f"instances.{name}", warnings)
        result[name] = _by_instance(group, flat)
    taken = {core for instances in result.values() for own in instances for c in own for core in c}
    left = tuple(core for core in sorted(allowed) if core not in taken)
    return CoreAssignment(cores=result, warnings=tuple(warnings), rest=left)


def core_warnings(
    bound: Mapping[str, tuple[tuple[Cores, ...], int]],
    *,
    quota_cores: float | None,
    nodes: Sequence[Cores],
) -> tuple[str, ...]:
    """Return what is wrong with cores that ranks were given.

    Args:
        bound: By instance, the cores of each of its ranks, and how many threads each rank has.
        quota_cores: CPU time that all may take together, in cores; ``None`` for no limit.
        nodes: Cores of each memory (NUMA) node.
    """
    warnings = []
    for name, (ranks, threads) in bound.items():
        for own in ranks:
            if threads > len(own):
                warnings.append(
                    f"{name}: {threads} threads on {len(own)} CPU cores ({_ranges(own)}) slow each "
                    "other down: lower OMP_NUM_THREADS in env, or leave it out"
                )
            if len([node for node in nodes if set(node) & set(own)]) > 1:
                warnings.append(
                    f"{name}: its CPU cores ({_ranges(own)}) are of several memory nodes, "
                    f"{'; '.join(map(_ranges, nodes))}: list instances.*.cores by node"
                )
    used = {core for ranks, _ in bound.values() for own in ranks for core in own}
    if quota_cores is not None and used and quota_cores < len(used):
        warnings.append(
            f"this container may take the time of {quota_cores:g} CPU cores, and instances are "
            f"bound to {len(used)}: they are stopped in the middle of steps; raise its limit "
            "(docker run --cpus), or list fewer cores"
        )
    return tuple(warnings)


def _split(cores: list[int], ranks: int, owner: str, warnings: list[str]) -> list[Cores]:
    if ranks == 0:
        return []
    if len(cores) < ranks:
        warnings.append(
            f"{owner} has {ranks} ranks for {len(cores)} CPU cores ({_ranges(cores)}): "
            "some share a core and slow each other down"
        )
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    each = len(cores) // ranks
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _check_list(
    name: str, group: InstanceGroup, devices: Sequence[str], available: Sequence[str] | None
) -> None:
    key = f"instances.{name}.devices"
    if len(devices) != ranks_of(group):
        raise ConfigError(
            f"{key}: {len(devices)} devices for count {group.count} × tensor_parallel_size "
            f"{group.tensor_parallel_size}; list {ranks_of(group)}"
        )
    width = group.tensor_parallel_size
    if any(len(set(own)) < width for own in _by_instance(group, devices)):
        raise ConfigError(f"{key}: one instance needs {width} different devices")
    for device in devices:
        if available is not None and device not in available:
            raise ConfigError(
                f"{key}: device {device} is not here; there are {', '.join(available) or 'none'}"
            )


def _too_few(
    groups: Mapping[str, InstanceGroup], *, wanted: int, free: int, total: int
) -> ConfigError:
    terms = " + ".join(
        f"{name} {group.count} × {group.tensor_parallel_size}"
        for name, group in groups.items()
        if group.devices is None and group.count
    )
    left = f"{total}" if free == total else f"{free} of {total} (the others are listed)"
    return ConfigError(
        f"the topology wants {wanted} devices ({terms}) and there are {left}; lower count or "
        "tensor_parallel_size, or let instances share devices by listing them in "
        "instances.*.devices"
    )


def _ranges(cores: Sequence[int]) -> str:
    """Write cores the way Linux does: ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
