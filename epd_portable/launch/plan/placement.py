"""Where each instance runs, and which devices of the others it sees. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd_portable.config.groups import Instances
from epd_portable.config.schema import Topology
from epd_portable.connector import registry
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.assign import CoreAssignment, Cores, assign_cores, assign_devices
from epd_portable.platforms.traits import PlatformTraits


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one instance runs.

    Attributes:
        port: Its HTTP port on the loopback address.
        devices: One device per rank; empty where the platform has no numbered devices.
        peers: Devices of other instances that it must see as well, behind its own.
        cores: The CPU cores of each rank; empty where ranks are not bound to cores.
        api_cores: Where its API server may run as well, see `_api_cores`.
    """

    port: int
    devices: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()
    api_cores: Cores = ()


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
        by_core = assign_cores(groups, cores)
        seats = {
            name: [
                Seat(port=free_port(), cores=own, api_cores=_api_cores(by_core, name, own))
                for own in instances
            ]
            for name, instances in by_core.cores.items()
        }
        return Seating(seats=seats, warnings=by_core.warnings, rest=by_core.rest)
    by_device = assign_devices(groups, devices)
    everyone: list[str] = []
    if traits.peers_must_be_visible and (path == registry.AUTO or registry.needs_devices(path)):
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


def _api_cores(assigned: CoreAssignment, name: str, own: Sequence[Cores]) -> Cores:
    """Return the cores that an instance's API server may use beside the instance's own.

    While a step computes, nobody else should on its cores: every token of everybody waits for it.
    An encoder's cores rest between pictures, and what comes late there makes one picture late.
    """
    if not any(own):
        return ()
    encoders = assigned.cores["encode"] if name != "encode" else []
    more = {core for instance in encoders for rank in instance for core in rank}
    return tuple(sorted({*more, *assigned.rest}.difference(*own)))


def _others(everyone: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """Return every device but one's own, each once, in the order of the plan."""
    return tuple(device for device in dict.fromkeys(everyone) if device not in own)
