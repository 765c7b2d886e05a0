"""Devices with their instances: in which order they start, how they divide its memory. Pure.

vLLM measures a device while it starts, and counts what others take or free meanwhile as its own.
So the instances of one device start one after the other; encode instances last, which have no KV
cache: what others take while they measure only makes their encoder cache smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from epd_portable.config.roles import ENCODES, TAKES_ITEMS, Role, group_of
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import InstancePlacement
from epd_portable.platforms.traits import PlatformTraits

DEFAULT_UTILIZATION = 0.92
"""vLLM's default of ``gpu_memory_utilization`` (0.30 to 0.32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """One instance on a device.

    Attributes:
        utilization: Part of the device's memory that its engine may take, its receive pool
            included.
        kv_cache_bytes: Of that, for the KV cache, of an encode instance for its encoder cache, as
            the file says it; ``None`` where the engine measures what is left.
        measures: Whether the engine measures what is left for its KV cache.
    """

    name: str
    role: Role
    utilization: float
    kv_cache_bytes: JsonValue
    measures: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedDevice:
    """A device with its instances, in the order in which they start."""

    device: str
    tenants: tuple[Tenant, ...]

    @property
    def is_shared(self) -> bool:
        """Whether there are several."""
        return len(self.tenants) > 1


def used_devices(
    topology: Topology, instances: Sequence[InstancePlacement]
) -> tuple[UsedDevice, ...]:
    """Return the devices that have instances."""
    tenants: dict[str, list[Tenant]] = {}
    # Those first that measure the memory of their device.
    for each in sorted(instances, key=lambda each: each.role == "encode"):
        group = topology.instances.of(each.role)
        arguments = {**topology.engine_args, **group.engine_args}
        kv_cache_bytes = arguments.get("kv_cache_memory_bytes")
        tenant = Tenant(
            name=each.name,
            role=each.role,
            utilization=_utilization(topology, each.role),
            kv_cache_bytes=kv_cache_bytes,
            measures=each.role != "encode" and kv_cache_bytes is None,
        )
        for device in each.devices:
            tenants.setdefault(device, []).append(tenant)
    return tuple(
        UsedDevice(device=device, tenants=tuple(tenants[device])) for device in sorted(tenants)
    )


def starts_after(devices: Sequence[UsedDevice]) -> dict[str, tuple[str, ...]]:
    """Return for each instance those on its devices that start before it, if there are any."""
    earlier: dict[str, dict[str, None]] = {}
    for each in devices:
        names = [tenant.name for tenant in each.tenants]
        for place, name in enumerate(names[1:], start=1):
            earlier.setdefault(name, {}).update(dict.fromkeys(names[:place]))
    return {name: tuple(others) for name, others in earlier.items()}


def shared_with(instances: Sequence[InstancePlacement]) -> dict[str, str]:
    """Return which prefill-decode instances have just what an encode instance has, and its name.

    They make pairs, see `epd_portable.placement.balance`.
    """
    encoders = {
        (each.devices, each.cores): each.name
        for each in instances
        if each.role == "encode" and (each.devices or each.cores)
    }
    return {
        each.name: encoders.pop((each.devices, each.cores))
        for each in instances
        if each.role == "prefill-decode" and (each.devices, each.cores) in encoders
    }


def check_sharing(
    topology: Topology, traits: PlatformTraits, devices: Sequence[UsedDevice]
) -> None:
    """Refuse groups of ranks on one device where the platform has none.

    Raises:
        ConfigError: Names the instances.
    """
    if topology.transfer.path != "collective" or not traits.one_rank_a_device:
        return
    for each in devices:
        pairs = itertools.permutations(each.tenants, 2)
        if any(one.role in ENCODES and other.role in TAKES_ITEMS for one, other in pairs):
            names = " and ".join(tenant.name for tenant in each.tenants)
            raise ConfigError(
                f"transfer.path: collective, and {names} are on device "
                f"{each.device}: {traits.dist_backend} makes no group of ranks on one device; "
                "write auto or ipc"
            )


def sharing_warnings(devices: Sequence[UsedDevice]) -> list[str]:
    """Return what may go wrong between instances on one device."""
    warnings = []
    for each in devices:
        if not each.is_shared:
            continue
        total = round(sum(tenant.utilization for tenant in each.tenants), 6)
        if total > 1:
            parts = ", ".join(f"{tenant.name} {tenant.utilization:g}" for tenant in each.tenants)
            warnings.append(
                f"device {each.device}: its instances together want more memory than it has; lower "
                f"gpu_memory_utilization, which adds up to {total:g} ({parts})"
            )
        for tenant in each.tenants:
            if tenant.measures:
                others = " and ".join(one.name for one in each.tenants if one is not tenant)
                warnings.append(
                    f"device {each.device}: when {tenant.name} is started again it takes what "
                    f"{others} need meanwhile for its own, and gets a smaller KV cache, or none; "
                    "set kv_cache_memory_bytes in "
                    f"instances.{group_of(tenant.role)}.engine_args"
                )
    return warnings


def _utilization(topology: Topology, role: Role) -> float:
    """Return the part of a device's memory that each engine of a role takes."""
    arguments = {**topology.engine_args, **topology.instances.of(role).engine_args}
    value = arguments.get("gpu_memory_utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_UTILIZATION
