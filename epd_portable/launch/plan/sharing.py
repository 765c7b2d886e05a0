"""Devices with their instances: in which order they start, how they divide its memory. Pure.

vLLM measures a device while it starts, and counts what others take or free meanwhile as its own.
So the instances of one device start one after the other; encode instances last, which have no KV
cache: what others take while they measure only makes their encoder cache smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from epd_portable.config.roles import ENCODES, TAKES_ITEMS, group_of
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import InstancePlacement
from epd_portable.platforms.traits import PlatformTraits

DEFAULT_UTILIZATION = 0.92
"""vLLM's default of ``gpu_memory_utilization`` (0.30 to 0.32)."""

Devices = Mapping[str, Sequence[InstancePlacement]]
"""Devices that have instances, with them in the order in which they start."""


def used_devices(instances: Sequence[InstancePlacement]) -> Devices:
    """Return the devices that have instances."""
    found: dict[str, list[InstancePlacement]] = {}
    # Those first that measure the memory of their device.
    for each in sorted(instances, key=lambda each: each.role == "encode"):
        for device in each.devices:
            found.setdefault(device, []).append(each)
    return dict(sorted(found.items()))


def starts_after(devices: Devices) -> dict[str, tuple[str, ...]]:
    """Return for each instance those on its devices that start before it, if there are any."""
    earlier: dict[str, dict[str, None]] = {}
    for instances in devices.values():
        names = [each.name for each in instances]
        for place, name in enumerate(names[1:], start=1):
            earlier.setdefault(name, {}).update(dict.fromkeys(names[:place]))
    return {name: tuple(others) for name, others in earlier.items()}


def check_sharing(topology: Topology, traits: PlatformTraits, devices: Devices) -> None:
    """Refuse groups of ranks on one device where the platform has none.

    Raises:
        ConfigError: Names the instances.
    """
    if topology.transfer.path != "collective" or not traits.one_rank_a_device:
        return
    for device, instances in devices.items():
        pairs = itertools.permutations(instances, 2)
        if any(one.role in ENCODES and other.role in TAKES_ITEMS for one, other in pairs):
            raise ConfigError(
                f"transfer.path: collective, and {_names(instances)} are on device {device}: "
                f"{traits.dist_backend} makes no group of ranks on one device; write auto or ipc"
            )


def sharing_warnings(topology: Topology, traits: PlatformTraits, devices: Devices) -> list[str]:
    """Return what may go wrong between instances on one device."""
    warnings = []
    for device, instances in devices.items():
        if len(instances) < 2:
            continue
        share = traits.share_env
        if share and not any(share[0] in _variables(topology, each) for each in instances):
            variable, remedy = share
            warnings.append(
                f"device {device}: {_names(instances)} compute in turns, by which first tokens of "
                "images came 1.2 to 1.3 times as late as one vLLM's (on one H200); set "
                f"{variable} in instances.*.env, and {remedy}"
            )
        parts = {each.name: _utilization(_arguments(topology, each)) for each in instances}
        if (total := round(sum(parts.values()), 6)) > 1:
            shown = ", ".join(f"{name} {part:g}" for name, part in parts.items())
            warnings.append(
                f"device {device}: its instances together want more memory than it has; lower "
                f"gpu_memory_utilization, which adds up to {total:g} ({shown})"
            )
        for each in instances:
            is_set = _arguments(topology, each).get("kv_cache_memory_bytes") is not None
            if each.role != "encode" and not is_set:
                others = _names([one for one in instances if one is not each])
                warnings.append(
                    f"device {device}: when {each.name} is started again it takes what {others} "
                    "need meanwhile for its own, and gets a smaller KV cache, or none; set "
                    f"kv_cache_memory_bytes in instances.{group_of(each.role)}.engine_args"
                )
    return warnings


def _names(instances: Sequence[InstancePlacement]) -> str:
    return " and ".join(each.name for each in instances)


def _variables(topology: Topology, instance: InstancePlacement) -> dict[str, str]:
    return {**topology.env, **topology.instances.of(instance.role).env}


def _arguments(topology: Topology, instance: InstancePlacement) -> dict[str, JsonValue]:
    return {**topology.engine_args, **topology.instances.of(instance.role).engine_args}


def _utilization(arguments: Mapping[str, JsonValue]) -> float:
    """Return the part of a device's memory that an engine takes, its receive pool included."""
    value = arguments.get("gpu_memory_utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_UTILIZATION
