"""Whether a plan fits one kind of hardware, and how long its transfers take there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_portable.config.roles import ROLES, TAKES_ITEMS, group_of
from epd_portable.config.schema import Topology
from epd_portable.connector import registry
from epd_portable.launch.plan.sharing import utilization
from epd_portable.launch.plan.target import Hardware
from epd_portable.platforms.traits import PlatformTraits

ITEM_BYTES = 32 << 20
"""The item that times are given for: 1024 tokens of 4096 × 4 bfloat16 numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareFit:
    """A plan beside a hardware profile.

    Attributes:
        profile: Name of the profile.
        device: What it describes.
        item_bytes: Size of the item that the times are for.
        transfer_s: Shortest time for that item by path, waits and protocol left out. ``tcp`` adds
            its sockets to the time of ``shm``.
    """

    profile: str
    device: str
    item_bytes: int
    transfer_s: dict[str, float]


def fit(hardware: Hardware) -> HardwareFit:
    """Return what a profile says of transfers between two devices of one server."""
    profile = hardware.profile
    pair_s = ITEM_BYTES / profile.pair_bytes_per_s.value
    # Down from the producer's device, up to the consumer's.
    host_s = 2 * ITEM_BYTES / profile.host_bytes_per_s.value
    return HardwareFit(
        profile=hardware.name,
        device=profile.device,
        item_bytes=ITEM_BYTES,
        transfer_s={"ipc": pair_s, "collective": pair_s, "shm": host_s},
    )


def memory_warnings(
    topology: Topology,
    traits: PlatformTraits,
    devices: Mapping[str, Sequence[Sequence[str]]],
    memory_bytes: int,
) -> list[str]:
    """Say on which devices a receive pool leaves its engine nothing.

    A pool in device memory lies on the device of the first rank of each instance that gets items.
    vLLM finds it there when it measures, and takes it from the engine's share.

    Args:
        topology: Checked configuration.
        traits: The platform.
        devices: For each group, for each of its instances, one device per rank.
        memory_bytes: What torch sees of one device.
    """
    if not traits.needs_device_copy or not registry.may_use_device_memory(topology.transfer.path):
        return []
    wanted = topology.transfer.pool_bytes
    warnings = []
    for role in ROLES:
        if role not in TAKES_ITEMS:
            continue
        share = utilization(topology, topology.instances.of(role))
        engine = round(share * memory_bytes)
        if wanted < engine:
            continue
        warnings += [
            f"device {ranks[0]}: the receive pool of {group_of(role)}-{index} wants {_mib(wanted)} "
            f"of the {_mib(engine)} that gpu_memory_utilization {share:g} gives to its engine (of "
            f"{_mib(memory_bytes)}); lower transfer.pool_bytes"
            for index, ranks in enumerate(devices[group_of(role)])
        ]
    return warnings


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
