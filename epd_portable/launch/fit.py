"""Whether a plan fits one kind of hardware, and how long its transfers take there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_portable.config.schema import InstanceGroup, Topology
from epd_portable.launch.target import Hardware
from epd_portable.platforms.traits import PlatformTraits

DEFAULT_UTILIZATION = 0.92
"""What vLLM takes for ``gpu_memory_utilization`` when nobody sets it (0.30 to 0.32)."""

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
    """Say on which devices engines and receive pools together want more memory than there is.

    An engine takes ``gpu_memory_utilization`` of a device for itself; a pool in device memory lies
    beside that, on the device of the first rank of each prefill-decode instance.

    Args:
        topology: Checked configuration.
        traits: The platform.
        devices: For each group, for each of its instances, one device per rank.
        memory_bytes: What torch sees of one device.
    """
    if not traits.needs_device_copy:
        return []
    engines: dict[str, float] = {}
    pools: Counter[str] = Counter()
    for name, instances in devices.items():
        share = utilization(topology, getattr(topology.instances, name))
        for ranks in instances:
            for device in ranks:
                engines[device] = engines.get(device, 0.0) + share
        if name == "prefill_decode" and topology.transfer.path in DEVICE_POOL_PATHS:
            pools.update(ranks[0] for ranks in instances)
    return [
        warning
        for device, share in engines.items()
        if (warning := _too_much(device, round(share, 6), pools[device], topology, memory_bytes))
    ]


def _too_much(
    device: str, share: float, pools: int, topology: Topology, memory_bytes: int
) -> str | None:
    """Return what is too much on a device, ``None`` when all fits."""
    whole = f"of {_mib(memory_bytes)}"
    if share > 1:
        return (
            f"device {device}: its engines together take {_mib(round(share * memory_bytes))} "
            f"{whole}; lower gpu_memory_utilization, which adds up to {share:g}"
        )
    wanted = pools * topology.transfer.pool_bytes
    left = round((1 - share) * memory_bytes)
    if wanted <= left:
        return None
    subject = "the receive pool wants" if pools == 1 else f"{pools} receive pools want"
    return (
        f"device {device}: {subject} {_mib(wanted)} in device memory, but gpu_memory_utilization "
        f"{share:g} leaves {_mib(left)} {whole}; lower it or transfer.pool_bytes"
    )


def utilization(topology: Topology, group: InstanceGroup) -> float:
    """Return the share of a device's memory that each engine of a group takes."""
    arguments = {**topology.engine_args, **group.engine_args}
    value = arguments.get("gpu_memory_utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_UTILIZATION


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
