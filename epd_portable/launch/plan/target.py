"""What a command plans for: a platform, and perhaps a hardware profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd_portable import envs
from epd_portable.config.hardware import HardwareProfile, find_profile, load_profile
from epd_portable.config.shipped import SHIPPED
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import TRAITS, PlatformTraits

PROFILES = (Path("configs/hardware"), SHIPPED / "hardware")
"""Where profiles are looked for last: seen from the working directory, and in the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A hardware profile that was asked for.

    Attributes:
        name: Its file's name without the ending.
        profile: Its content.
    """

    name: str
    profile: HardwareProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to plan for.

    Attributes:
        traits: The platform.
        hardware: The profile that was asked for, if any.
    """

    traits: PlatformTraits
    hardware: Hardware | None = None


def find_target(platform: str | None, hardware: str | None, config: Path) -> Target:
    """Join the options ``--platform`` and ``--hardware``.

    Args:
        platform: What the user asked for, or the environment; ``None`` takes the profile's.
        hardware: Name or file of a profile.
        config: The topology file; profiles are looked for in the folder ``hardware`` beside it.

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
    """Read a profile by its name or file; see ``find_profile``."""
    path = find_profile(name, _folders(beside))
    return Hardware(name=path.stem, profile=load_profile(path))


def profile_names(beside: Path | None = None) -> list[str]:
    """Return the names of the profiles that are found, for shells to complete.

    Args:
        beside: The topology file, if it is known.
    """
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
