"""Whether a plan fits one kind of hardware, and how long its transfers take there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_portable.config.schema import Topology
from epd_portable.launch.sharing import utilization
from epd_portable.launch.target import Hardware
from epd_portable.platforms.traits import PlatformTraits

DEVICE_POOL_PATHS = frozenset({"auto", "ipc", "collective"})
"""Values of ``transfer.path`` with which receivers keep a pool in device memory. Told here, like
those in ``seats``, because the table of paths needs torch."""

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

    A pool in device memory lies on the device of the first rank of each prefill-decode instance.
    vLLM finds it there when it measures, and takes it from the engine's share.

    Args:
        topology: Checked configuration.
        traits: The platform.
        devices: For each group, for each of its instances, one device per rank.
        memory_bytes: What torch sees of one device.
    """
    if not traits.needs_device_copy or topology.transfer.path not in DEVICE_POOL_PATHS:
        return []
    share = utilization(topology, topology.instances.prefill_decode)
    wanted, engine = topology.transfer.pool_bytes, round(share * memory_bytes)
    if wanted < engine:
        return []
    return [
        f"device {ranks[0]}: the receive pool of prefill_decode-{index} wants {_mib(wanted)} of "
        f"the {_mib(engine)} that gpu_memory_utilization {share:g} gives to its engine (of "
        f"{_mib(memory_bytes)}); lower transfer.pool_bytes"
        for index, ranks in enumerate(devices["prefill_decode"])
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
