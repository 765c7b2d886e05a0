"""Where each instance runs, and which devices of the others it sees. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd_portable.config.schema import Instances, Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.assign import Cores, assign_cores, assign_devices
from epd_portable.platforms.traits import PlatformTraits

DEVICE_MEMORY_PATHS = frozenset({"ipc"})
"""Paths that open device memory of another process: where devices have none, they cannot be."""

PEER_PATHS = frozenset({"auto", *DEVICE_MEMORY_PATHS})
"""Values of ``transfer.path`` with which instances may open device memory of each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one instance runs.

    Attributes:
        port: Its HTTP port on the loopback address.
        devices: One device per rank; empty where the platform has no numbered devices.
        peers: Devices of other instances that it must see as well, behind its own.
        cores: The CPU cores of each rank; empty where ranks are not bound to cores.
    """

    port: int
    devices: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Seating:
    """Where all instances run.

    Attributes:
        seats: Of each group.
        warnings: What the user should know.
        rest: CPU cores that no instance has, where they are bound to cores.
    """

    seats: dict[str, list[Seat]]
    warnings: tuple[str, ...]
    rest: Cores = ()


def place_instances(
    topology: Topology,
    traits: PlatformTraits,
    *,
    devices: Sequence[str] | None,
    cores: Sequence[int],
    free_port: Callable[[], int],
) -> Seating:
    """Give every instance a port, and devices or cores.

    Args:
        topology: Checked configuration of the chosen platform.
        traits: The chosen platform.
        devices: Devices to share out; ``None`` when nobody asked the machine.
        cores: CPU cores to share out.
        free_port: Hands out one loopback port after another.

    Raises:
        ConfigError: The topology does not fit the platform or the machine.
    """
    path = topology.transfer.path
    if path in DEVICE_MEMORY_PATHS and not traits.needs_device_copy:
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
        by_core = assign_cores(groups, cores)
        seats = {
            name: [Seat(port=free_port(), cores=own) for own in instances]
            for name, instances in by_core.cores.items()
        }
        return Seating(seats=seats, warnings=by_core.warnings, rest=by_core.rest)
    by_device = assign_devices(groups, devices)
    everyone: list[str] = []
    if traits.peers_must_be_visible and path in PEER_PATHS:
        everyone = [
            device
            for instances in by_device.devices.values()
            for own in instances
            for device in own
        ]
    seats = {
        name: [
            Seat(port=free_port(), devices=own, peers=_others(everyone, own)) for own in instances
        ]
        for name, instances in by_device.devices.items()
    }
    return Seating(seats=seats, warnings=())


def _others(everyone: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """Return every device but one's own, each once, in the order of the plan."""
    return tuple(device for device in dict.fromkeys(everyone) if device not in own)
