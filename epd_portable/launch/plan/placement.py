"""Devices or CPU cores of each instance, if platform and network suit the file. Pure.

vLLM measures a device while it starts, and counts what others take or free meanwhile as its own.
So the instances of one device start one after the other; encode instances last, which have no KV
cache: what others take while they measure only makes their encoder cache smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from pydantic import JsonValue

from epd_portable.config.groups import InstanceGroup
from epd_portable.config.instance import AUTO
from epd_portable.config.roles import ENCODES, ROLES, TAKES_ITEMS, Role, group_of
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.machine import Machine
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.transfer import registry
from epd_portable.transfer.curve import is_off_host

DEFAULT_UTILIZATION = 0.92
"""vLLM's default of ``gpu_memory_utilization`` (0.30 to 0.32)."""

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

    @property
    def by_device(self) -> dict[str, list[InstancePlacement]]:
        """The devices that have instances, with them in the order in which they start."""
        found: dict[str, list[InstancePlacement]] = {}
        # Those first that measure the memory of their device.
        for each in sorted(self.instances, key=lambda each: each.role == "encode"):
            for device in each.devices:
                found.setdefault(device, []).append(each)
        return dict(sorted(found.items()))

    def starts_after(self, name: str) -> tuple[str, ...]:
        """Return the instances on the devices of one that start before it."""
        rows = ([each.name for each in instances] for instances in self.by_device.values())
        earlier = (row[: row.index(name)] for row in rows if name in row)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(earlier)))


def place_instances(
    topology: Topology,
    traits: PlatformTraits,
    machine: Machine,
    roles: Collection[Role] = ROLES,
) -> Placements:
    """Give instances of some roles devices, if these are known, or some of the CPU cores.

    Raises:
        ConfigError: The topology does not fit the platform, the network or the machine.
    """
    _check_host(topology, traits)
    path = topology.transfer.path
    needs_devices = registry.needs_devices(path)
    if needs_devices and not traits.needs_device_copy:
        raise ConfigError(
            f"transfer.path: {path} writes into the memory of a device, and devices of platform "
            f"{traits.name} have none of their own; write auto or shm"
        )
    numbered = traits.visible_devices_env is not None
    groups = {role: topology.instances.of(role) for role in ROLES if role in roles}
    refused = "cores" if numbered else "devices"
    for role, group in groups.items():
        if getattr(group, refused) is not None:
            raise ConfigError(
                f"instances.{group_of(role)}.{refused}: platform {traits.name} has no use for it; "
                "move it under platform.<name> of the platform that it is meant for"
            )
    # The list of a group without instances is for where they are started.
    groups = {role: group for role, group in groups.items() if group.count}
    warnings: list[str] = []
    devices = place_on_devices(groups, machine.devices) if numbered else {}
    cores = {} if numbered else place_on_cores(groups, machine.cores, warnings)
    sees_all = traits.peers_must_be_visible and (path == AUTO or needs_devices)
    visible = dict.fromkeys(itertools.chain(*devices.values())) if sees_all else {}
    launcher = f"@{topology.launch.name or topology.launch.host}" if topology.launch.join else ""
    instances = []
    for role, group in groups.items():
        for index in range(group.count):
            ranks = slice(
                index * group.tensor_parallel_size, (index + 1) * group.tensor_parallel_size
            )
            own = tuple(devices.get(role, ())[ranks])
            placement = InstancePlacement(
                name=f"{group_of(role)}-{index}{launcher}",
                role=role,
                devices=own,
                peers=tuple(one for one in visible if one not in own),
                cores=tuple(cores.get(role, ())[ranks]),
            )
            instances.append(placement)
    bound = {core for ranks in cores.values() for rank in ranks for core in rank}
    rest = tuple(sorted({*machine.cores} - bound)) if bound else ()
    placed = Placements(instances=tuple(instances), rest=rest)
    if path == "collective" and traits.one_rank_a_device:
        _refuse_groups_on_one_device(placed, traits)
    warnings += _sharing_warnings(topology, traits, placed)
    return replace(placed, warnings=tuple(warnings))


def _check_host(topology: Topology, traits: PlatformTraits) -> None:
    host, transfer = topology.launch.host, topology.transfer
    if not is_off_host(host):
        for url in topology.launch.join:
            if is_off_host(urlsplit(url).hostname or ""):
                raise ConfigError(
                    f"launch.join {url} is on another host, which does not reach launch.host "
                    f"{host}; set launch.host to this machine's address in its network"
                )
        return
    if topology.secret_file is None:
        raise ConfigError(
            f"launch.host {host} is not the loopback address: set secret_file, which the other "
            "hosts must hold too (epd-launch secret FILE makes one)"
        )
    registry.offered(transfer.path, traits.name, plain=transfer.trusted_network)


def ranks_of(group: InstanceGroup) -> int:
    """Return how many ranks a group has in all."""
    return group.count * group.tensor_parallel_size


def place_on_devices(
    groups: Mapping[Role, InstanceGroup], available: Sequence[str] | None
) -> dict[Role, list[str]]:
    """Return a device for every rank.

    Groups with a ``devices`` list keep to it; the others share out what no list names, each device
    once. With ``available`` unknown (``None``) there are as many as are wanted.

    Raises:
        ConfigError: More devices are wanted than there are, a list names one that is not here, or
            a list has the wrong length.
    """
    listed: list[str] = []
    for role, group in groups.items():
        if group.devices is None:
            continue
        listed += group.devices
        key, count = f"instances.{group_of(role)}.devices", len(group.devices)
        if count != ranks_of(group):
            raise ConfigError(
                f"{key}: {count} devices for count {group.count} × tensor_parallel_size "
                f"{group.tensor_parallel_size}; list {ranks_of(group)}"
            )
        width = group.tensor_parallel_size
        if any(len({*group.devices[at : at + width]}) < width for at in range(0, count, width)):
            raise ConfigError(f"{key}: one instance needs {width} different devices")
        if away := [one for one in group.devices if available is not None and one not in available]:
            here = ", ".join(available or ()) or "none"
            raise ConfigError(f"{key}: device {away[0]} is not here; there are {here}")
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
    return {
        role: group.devices or [*itertools.islice(supply, ranks_of(group))]
        for role, group in groups.items()
    }


def place_on_cores(
    groups: Mapping[Role, InstanceGroup], allowed: Sequence[int], warnings: list[str]
) -> dict[Role, list[Cores]]:
    """Return CPU cores of its own for every rank, the same number for all that no list is for.

    With fewer cores than ranks, and no list, no rank is bound: one that waits for another spins,
    and on the same core it would keep from running what it waits for.

    Raises:
        ConfigError: A ``cores`` list names a core that is not ``allowed``.
    """
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
    count = sum(map(ranks_of, groups.values()))
    if not listed and len(allowed) < count:
        warnings.append(
            f"the topology has {count} ranks for {len(allowed)} CPU cores "
            f"({_ranges(allowed)}): none is bound to a core, and they slow each other down"
        )
        return {}
    rest = sorted(set(allowed) - listed)
    wanted = sum(ranks_of(group) for group in groups.values() if group.cores is None)
    if wanted and not rest:
        warnings.append("the lists take every core: groups without a list share those cores")
        rest = sorted(allowed)
    shares = iter(_split(rest, wanted, "the rest of the topology", warnings))
    return {
        role: [*itertools.islice(shares, ranks_of(group))]
        if group.cores is None
        else _split(
            sorted({*group.cores}), ranks_of(group), f"instances.{group_of(role)}", warnings
        )
        for role, group in groups.items()
    }


def _split(cores: list[int], ranks: int, owner: str, warnings: list[str]) -> list[Cores]:
    if ranks and len(cores) < ranks:
        warnings.append(
            f"{owner} has {ranks} ranks for {len(cores)} CPU cores ({_ranges(cores)}): "
            "some share a core and slow each other down"
        )
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    each = len(cores) // max(ranks, 1)
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _ranges(cores: Sequence[int]) -> str:
    """Write cores the way Linux does: ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _refuse_groups_on_one_device(placed: Placements, traits: PlatformTraits) -> None:
    for device, instances in placed.by_device.items():
        pairs = itertools.permutations(instances, 2)
        if any(one.role in ENCODES and other.role in TAKES_ITEMS for one, other in pairs):
            raise ConfigError(
                f"transfer.path: collective, and {_names(instances)} are on device {device}: "
                f"{traits.dist_backend} makes no group of ranks on one device; write auto or ipc"
            )


def _sharing_warnings(
    topology: Topology, traits: PlatformTraits, placed: Placements
) -> Iterator[str]:
    """Yield what may go wrong between instances on one device."""
    for device, instances in placed.by_device.items():
        if len(instances) < 2:
            continue
        groups = [topology.instances.of(each.role) for each in instances]
        share = traits.share_env
        if share and not any({**topology.env, **one.env}.get(share[0]) for one in groups):
            variable, remedy = share
            yield (
                f"device {device}: {_names(instances)} compute in turns and without priorities, "
                "by which first tokens of images came 1.2 to 1.3 times as late as one vLLM's (on "
                f"one H200); set {variable} in instances.*.env, and {remedy}"
            )
        arguments = {each.name: topology.engine_args_of(each.role) for each in instances}
        parts = {name: _utilization(own) for name, own in arguments.items()}
        if (total := round(sum(parts.values()), 6)) > 1:
            shown = ", ".join(f"{name} {part:g}" for name, part in parts.items())
            yield (
                f"device {device}: its instances together want more memory than it has; lower "
                f"gpu_memory_utilization, which adds up to {total:g} ({shown})"
            )
        for each in instances:
            is_set = arguments[each.name].get("kv_cache_memory_bytes") is not None
            if each.role != "encode" and not is_set:
                others = _names([one for one in instances if one is not each])
                yield (
                    f"device {device}: when {each.name} is started again it takes what {others} "
                    "need meanwhile for its own, and gets a smaller KV cache, or none; set "
                    f"kv_cache_memory_bytes in instances.{group_of(each.role)}.engine_args"
                )


def _names(instances: Sequence[InstancePlacement]) -> str:
    return " and ".join(each.name for each in instances)


def _utilization(arguments: Mapping[str, JsonValue]) -> float:
    """Return the part of a device's memory that an engine takes, its receive pool included."""
    value = arguments.get("gpu_memory_utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_UTILIZATION
