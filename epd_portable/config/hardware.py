"""Hardware profiles: the devices of one kind of server, for plans of a machine that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, PrivateAttr, field_validator

from epd_portable import envs
from epd_portable.config.instance import PlatformName
from epd_portable.config.load import SHIPPED
from epd_portable.config.problems import checked, read_text
from epd_portable.config.quantities import Port, Section
from epd_portable.errors import ConfigError

PROFILES = SHIPPED / "hardware"


class HardwareProfile(Section):
    """A kind of server; ``docs/configuration.md`` defines the keys."""

    platform: PlatformName
    device: Annotated[str, Field(min_length=1)]
    accelerator_type: Annotated[str, Field(min_length=1)] | None = None
    devices_per_node: Annotated[int, Field(ge=1, le=1024)]
    avoid_ports: Annotated[list[Port], Field(min_length=2, max_length=2)] | None = None
    _name: str = PrivateAttr(default="")

    @field_validator("avoid_ports")
    @classmethod
    def _is_in_order(cls, ports: list[int] | None) -> list[int] | None:
        if ports and ports[0] > ports[1]:
            raise ValueError(f"{ports[0]} is above {ports[1]}; swap them")
        return ports

    @property
    def name(self) -> str:
        """Name of its file, without the extension."""
        return self._name

    @property
    def ports_to_avoid(self) -> range:
        """Empty where the profile names none."""
        return range(self.avoid_ports[0], self.avoid_ports[1] + 1) if self.avoid_ports else range(0)


def load_profile(path: Path) -> HardwareProfile:
    """Read a hardware profile.

    Raises:
        ConfigError: The file cannot be read, or it lists every problem of its content.
    """
    profile = checked(read_text(path), HardwareProfile, source=str(path))
    profile._name = path.stem
    return profile


def find_hardware(name: str, platform: str | None) -> HardwareProfile:
    """Read a profile.

    Args:
        name: One of the package, such as ``910b-64g``, or the path of a file, which has a ``/`` or
            ends in ``.yaml``.

    Raises:
        ConfigError: It is not there, wrong, or of another platform.
    """
    path = Path(name)
    if "/" not in name and path.suffix != ".yaml":
        path = PROFILES / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in PROFILES.glob("*.yaml")))
            raise ConfigError(
                f"--hardware {name}: no such profile; there are {known}. Give one of them, or the "
                "path of a file"
            )
    profile = load_profile(path)
    if platform not in (None, profile.platform):
        raise ConfigError(
            f"--hardware {path.stem} is a profile of platform {profile.platform}, and "
            f"--platform (or {envs.EPD_PLATFORM.name}) is {platform}; leave --platform out, or "
            "choose another profile"
        )
    return profile
