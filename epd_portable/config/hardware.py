"""Hardware profiles: what one kind of server has, every number with its source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from epd_portable.config.instance import PlatformName
from epd_portable.config.problems import checked, read_text
from epd_portable.config.quantities import Section, Size

T = TypeVar("T")

DECIMAL = {"G": 10**9, "T": 10**12}


def _in(unit: str, example: str) -> BeforeValidator:
    """Return what reads ``25GB/s`` or ``312TFLOPS``; all else is left to the type check."""

    def scaled(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([GT]){unit}", value.strip())
        if match is None:
            raise ValueError(f"{value!r} has no such unit; write it as in {example}")
        return round(float(match[1]) * DECIMAL[match[2]])

    return BeforeValidator(scaled)


Count = Annotated[int, Field(ge=1, le=1024)]
Bytes = Annotated[Size, Field(gt=0)]
Rate = Annotated[int, _in("B/s", "25GB/s or 2.039TB/s"), Field(gt=0)]
Flops = Annotated[int, _in("FLOPS", "312TFLOPS"), Field(gt=0)]
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
    memory_bytes_per_s: Figure[Rate]
    bf16_flops: Figure[Flops]
    pair_bytes_per_s: Figure[Rate]
    host_bytes_per_s: Figure[Rate]
    network_bytes_per_s: Figure[Rate]
    avoid_ports: Ports | None = None
    software: dict[str, Figure[Version]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

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
    return checked(read_text(path), HardwareProfile, source=str(path))
