"""Who gets which devices or CPU cores. Pure: what the machine has comes in as arguments.

A *seat* is what one rank of one instance needs: one device, or one set of CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_portable.config.groups import InstanceGroup
from epd_portable.errors import ConfigError

Cores = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAssignment:
    """Devices of every instance.

    Attributes:
        devices: For each group, for each of its instances, one device per rank.
    """

    devices: dict[str, list[tuple[str, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreAssignment:
    """CPU cores of every instance.

    Attributes:
        cores: For each group, for each of its instances, the cores of each rank; nothing for one
            whose ranks are not bound.
        warnings: What the user should know, for example a core used twice.
        rest: Cores that no rank has.
    """

    cores: dict[str, list[tuple[Cores, ...]]]
    warnings: tuple[str, ...]
    rest: Cores = ()


def seats(group: InstanceGroup) -> int:
    """Return how many ranks a group has in all."""
    return group.count * group.tensor_parallel_size


def assign_devices(
    groups: dict[str, InstanceGroup], available: Sequence[str] | None
) -> DeviceAssignment:
    """Give every rank a device.

    Groups with a ``devices`` list keep to it; the others share out what no list names, each device
    once.

    Args:
        groups: Instance groups by their name in the topology file.
        available: Devices of this machine; ``None`` when that is not known, which takes every
            wish for granted.

    Raises:
        ConfigError: More devices are wanted than there are, a list names one that is not here, or
            a list has the wrong length.
    """
    listed: list[str] = []
    for name, group in groups.items():
        if group.devices is not None:
            _check_list(name, group, group.devices, available)
            listed += group.devices
    wanted = sum(seats(group) for group in groups.values() if group.devices is None)
    if available is None:
        pool = [str(index) for index in range(wanted + len(listed))]
    else:
        pool = list(available)
    free = [device for device in pool if device not in listed]
    if wanted > len(free):
        _raise_too_few(groups, wanted=wanted, free=len(free), total=len(pool))
    supply = iter(free)
    result: dict[str, list[tuple[str, ...]]] = {}
    for name, group in groups.items():
        flat = group.devices or [next(supply) for _ in range(seats(group))]
        width = group.tensor_parallel_size
        result[name] = [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]
    return DeviceAssignment(devices=result)


def assign_cores(groups: dict[str, InstanceGroup], allowed: Sequence[int]) -> CoreAssignment:
    """Give every rank CPU cores of its own, the same number to all that no list is for.

    With fewer cores than ranks, and no list, no rank is bound: one that waits for another spins,
    and on the same core it would keep from running what it waits for.

    Args:
        groups: Instance groups by their name in the topology file.
        allowed: Cores that this process may use.

    Raises:
        ConfigError: A ``cores`` list names a core that this process may not use.
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
    ranks = sum(map(seats, groups.values()))
    if not listed and len(allowed) < ranks:
        return CoreAssignment(
            cores={name: [()] * group.count for name, group in groups.items()},
            warnings=(
                f"the topology has {ranks} ranks for {len(allowed)} CPU cores "
                f"({_ranges(allowed)}): none is bound to a core, and they slow each other down",
            ),
        )
    rest = [core for core in sorted(allowed) if core not in listed]
    unlisted = {name: group for name, group in groups.items() if group.cores is None}
    if unlisted and not rest:
        warnings.append("the lists take every core: groups without a list share those cores")
        rest = sorted(allowed)
    result: dict[str, list[tuple[Cores, ...]]] = {}
    shares = _split(rest, sum(map(seats, unlisted.values())), "the rest of the topology", warnings)
    for name, group in groups.items():
        if group.cores is None:
            flat, shares = shares[: seats(group)], shares[seats(group) :]
        else:
            flat = _split(sorted(set(group.cores)), seats(group), f"instances.{name}", warnings)
        width = group.tensor_parallel_size
        result[name] = [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]
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
    if len(devices) != seats(group):
        raise ConfigError(
            f"{key}: {len(devices)} devices for count {group.count} × tensor_parallel_size "
            f"{group.tensor_parallel_size}; list {seats(group)}"
        )
    width = group.tensor_parallel_size
    for start in range(0, len(devices), width):
        if len(set(devices[start : start + width])) < width:
            raise ConfigError(f"{key}: one instance needs {width} different devices")
    for device in devices:
        if available is not None and device not in available:
            raise ConfigError(
                f"{key}: device {device} is not here; there are {', '.join(available) or 'none'}"
            )


def _raise_too_few(groups: dict[str, InstanceGroup], *, wanted: int, free: int, total: int) -> None:
    terms = " + ".join(
        f"{name} {group.count} × {group.tensor_parallel_size}"
        for name, group in groups.items()
        if group.devices is None and group.count
    )
    left = f"{total}" if free == total else f"{free} of {total} (the others are listed)"
    raise ConfigError(
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
