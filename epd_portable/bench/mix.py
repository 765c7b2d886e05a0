"""A mix of requests, as `load` asks for it and `plan` simulates it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=28, le=4096)]


class Mix(BaseModel):
    """A mix of requests; of several values each request, or picture, has one at random."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Share = Field(0.1, description="part of the requests that have pictures")
    pictures: tuple[PositiveInt, ...] = Field((1,), description="pictures of such a request")
    size: tuple[Side, ...] = Field((448,), description="side of a picture in pixels")
    text: PositiveInt = Field(400, description="tokens of a prompt's text")
    output: PositiveInt = Field(150, description="tokens of an answer")

    def __str__(self) -> str:
        """Return all keys as `read_keys` takes them."""
        return as_typed(self.model_dump())


M = TypeVar("M", bound=Mix)


def as_typed(values: Mapping[str, Any]) -> str:
    """Return keys and values as `read_keys` takes them."""
    return ",".join(f"{name}={_slashed(value)}" for name, value in values.items())


def _slashed(value: Any) -> str:
    """Return one value, or several with slashes between."""
    if isinstance(value, tuple):
        return "/".join(map(_slashed, value))
    return value if isinstance(value, str) else f"{value:g}"


def read_keys(
    option: str, text: str, kind: type[Mix], *, several: tuple[str, ...] = ("pictures", "size")
) -> dict[str, Any]:
    """Return the keys of ``KEY=VALUE,...``, of some with several values.

    Args:
        option: Of the command line; errors name it.

    Raises:
        ConfigError: A key is none of the kind's.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in kind.model_fields:
            raise ConfigError(f"{option} {text}: {key!r} is none of {', '.join(kind.model_fields)}")
        values[key] = value.split("/") if key in several else value
    return values


def checked_mix(option: str, text: str, kind: type[M], values: dict[str, Any]) -> M:
    """Return a mix with these values.

    Raises:
        ConfigError: One is none.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(f"{option} {text}: {in_one_line(error)}") from error


def describe_keys(kind: type[Mix]) -> str:
    """Return a line, or more, of ``--help`` for each key."""
    lines = []
    for name, field in kind.model_fields.items():
        default = f" [default: {_slashed(field.default)}]" if field.default else ""
        lines += textwrap.wrap(
            f"{field.description}{default}",
            width=98,
            initial_indent=f"  {name:<10}",
            subsequent_indent=" " * 12,
        )
    return "\n".join(lines)
