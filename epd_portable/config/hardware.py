"""Hardware profiles: what one kind of server has, every number with its source; where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, PrivateAttr, model_validator

from epd_portable import envs
from epd_portable.config.instance import PlatformName
from epd_portable.config.load import SHIPPED
from epd_portable.config.problems import checked, read_text
from epd_portable.config.quantities import Section, Size
from epd_portable.errors import ConfigError

T = TypeVar("T")

PROFILES = (Path("configs/hardware"), SHIPPED / "hardware")
"""Where profiles are looked for last: in the working directory, and in the package."""


Count = Annotated[int, Field(ge=1, le=1024)]
Bytes = Annotated[Size, Field(gt=0)]
Version = Annotated[str, Field(min_length=1)]
Quality = Literal["datasheet", "measured", "secondary", "derived"]


class Sourced(Section):
    """How far a number can be trusted.

    Attributes:
        quality: ``datasheet``: the vendor states it. ``measured``: published measurements.
            ``secondary``: a third party states it. ``derived``: arithmetic on other numbers.
        source: Where it can be read, or the arithmetic; all but ``derived`` need an address.
    """

    quality: Quality
    source: Annotated[str, Field(min_length=10)]

    @model_validator(mode="after")
    def _has_an_address(self) -> Sourced:
        if self.quality != "derived" and "https://" not in self.source:
            raise ValueError(f"source of a {self.quality} number must hold an https:// address")
        return self


class Figure(Sourced, Generic[T]):
    """One number, in the unit that its key ends with, and where it comes from."""

    value: T


class Ports(Sourced):
    """A range of ports, both ends included."""

    first: Annotated[int, Field(ge=1, le=65535)]
    last: Annotated[int, Field(ge=1, le=65535)]

    @model_validator(mode="after")
    def _is_in_order(self) -> Ports:
        if self.first > self.last:
            raise ValueError(f"first {self.first} is above last {self.last}; swap them")
        return self


class HardwareProfile(Section):
    """One kind of server; ``docs/configuration.md`` says what each key means."""

    platform: PlatformName
    device: Annotated[str, Field(min_length=1)]
    accelerator_type: Annotated[str, Field(min_length=1)] | None = None
    devices_per_node: Figure[Count]
    memory_bytes: Figure[Bytes]
    torch_memory_bytes: Figure[Bytes] | None = None
    avoid_ports: Ports | None = None
    software: dict[str, Figure[Version]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    _name: str = PrivateAttr(default="")

    @property
    def name(self) -> str:
        """That of its file, without the ending."""
        return self._name

    @property
    def usable_memory_bytes(self) -> int:
        """What an engine divides on one device."""
        return (self.torch_memory_bytes or self.memory_bytes).value

    @property
    def ports_to_avoid(self) -> range:
        """Empty where the profile names none."""
        ports = self.avoid_ports
        return range(ports.first, ports.last + 1) if ports else range(0)


def load_profile(path: Path) -> HardwareProfile:
    """Read a hardware profile.

    Raises:
        ConfigError: The file cannot be read, or it lists every problem of its content.
    """
    profile = checked(read_text(path), HardwareProfile, source=str(path))
    profile._name = path.stem
    return profile


def find_hardware(
    name: str, platform: str | None, *, beside: Path | None = None
) -> HardwareProfile:
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
    return profile


def _files(beside: Path | None) -> dict[str, Path]:
    folders = (*([beside.parent / "hardware"] if beside else []), *PROFILES)
    return {path.stem: path for each in reversed(folders) for path in each.glob("*.yaml")}
