"""What a command plans for: a platform, and perhaps a hardware profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd_portable import envs
from epd_portable.config.hardware import HardwareProfile, find_profile, load_profile
from epd_portable.config.load import SHIPPED
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import TRAITS, PlatformTraits

PROFILES = (Path("configs/hardware"), SHIPPED / "hardware")
"""Where profiles are looked for last: in the working directory, and in the package."""
ITEM_BYTES = 32 << 20
"""The item that transfer times are given for: 1024 tokens of 4096 × 4 bfloat16 numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A hardware profile; its name is its file's, without the ending."""

    name: str
    profile: HardwareProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to plan for."""

    traits: PlatformTraits
    hardware: Hardware | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareFit:
    """What a hardware profile says of a plan.

    Attributes:
        profile: Name of the profile.
        device: Name of the device, and the servers that hold it.
        item_bytes: Size of the item that the times are for.
        transfer_s: Shortest time for that item by path, waits and protocol left out. ``tcp`` adds
            its sockets to the time of ``shm``.
    """

    profile: str
    device: str
    item_bytes: int
    transfer_s: dict[str, float]


def find_target(platform: str | None, hardware: str | None, config: Path) -> Target:
    """Join the options ``--platform`` and ``--hardware``.

    Args:
        platform: Name; ``None`` takes the profile's.
        hardware: Name or file of a profile.
        config: Topology file; profiles are looked for in the folder ``hardware`` beside it first.

    Raises:
        ConfigError: Neither was given, they contradict each other, or the profile is not there or
            wrong.
    """
    if hardware is not None:
        found = find_hardware(hardware, beside=config)
        require_platform(found, platform)
        return Target(traits=TRAITS[found.profile.platform], hardware=found)
    if platform is None:
        raise ConfigError("name a platform with --platform, or a hardware profile with --hardware")
    return Target(traits=TRAITS[platform])


def find_hardware(name: str, *, beside: Path | None = None) -> Hardware:
    """Read a profile by its name or file; see `find_profile`."""
    path = find_profile(name, _folders(beside))
    return Hardware(name=path.stem, profile=load_profile(path))


def profile_names(beside: Path | None = None) -> list[str]:
    """Return the names of the profiles that are found, for shells to complete."""
    return sorted({path.stem for folder in _folders(beside) for path in folder.glob("*.yaml")})


def _folders(beside: Path | None) -> list[Path]:
    folders = [beside.parent / "hardware"] if beside else []
    for last in PROFILES:
        if all(folder.resolve() != last.resolve() for folder in folders):
            folders.append(last)
    return folders


def require_platform(hardware: Hardware, platform: str | None) -> None:
    """Check that a profile is one of the platform that was asked for, if one was.

    Raises:
        ConfigError: It is not.
    """
    if platform not in (None, hardware.profile.platform):
        raise ConfigError(
            f"--hardware {hardware.name} is a profile of platform {hardware.profile.platform}, and "
            f"--platform (or {envs.EPD_PLATFORM.name}) says {platform}; leave --platform out, or "
            "choose another profile"
        )


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
