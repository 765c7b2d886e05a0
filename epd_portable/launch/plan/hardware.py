"""Hardware profiles: where they are looked for, and what one says of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd_portable import envs
from epd_portable.config.hardware import HardwareProfile, load_profile
from epd_portable.config.load import SHIPPED
from epd_portable.errors import ConfigError

PROFILES = (Path("configs/hardware"), SHIPPED / "hardware")
"""Where profiles are looked for last: in the working directory, and in the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A hardware profile; its name is its file's, without the ending."""

    name: str
    profile: HardwareProfile


def find_hardware(name: str, platform: str | None, *, beside: Path | None = None) -> Hardware:
    """Read a profile.

    Args:
        name: A name such as ``910b-64g``, or the path of a file, which has a ``/`` or ends in
            ``.yaml``.
        beside: Topology file; the folder ``hardware`` beside it is looked into first, then
            `PROFILES`.

    Raises:
        ConfigError: It is not there, wrong, or of another platform.
    """
    path, files = Path(name), _files(beside)
    if "/" not in name and path.suffix != ".yaml":
        if name not in files:
            known = f"there are {', '.join(sorted(files))}" if files else "there is none"
            raise ConfigError(
                f"--hardware {name}: no such profile; {known}. Give one of them, or the path of a "
                "file"
            )
        path = files[name]
    profile = load_profile(path)
    if platform not in (None, profile.platform):
        raise ConfigError(
            f"--hardware {path.stem} is a profile of platform {profile.platform}, and "
            f"--platform (or {envs.EPD_PLATFORM.name}) says {platform}; leave --platform out, or "
            "choose another profile"
        )
    return Hardware(name=path.stem, profile=profile)


def _files(beside: Path | None) -> dict[str, Path]:
    folders = (*([beside.parent / "hardware"] if beside else []), *PROFILES)
    return {path.stem: path for each in reversed(folders) for path in each.glob("*.yaml")}
