"""Parameters of built-in types of plug-ins, checked as strictly as the rest of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Part = Annotated[float, Field(ge=0, le=1, strict=False)]
Name = Annotated[str, Field(min_length=1)]
_IGNORED = "without effect"
Ignored = Annotated[JsonValue, _IGNORED]
"""A parameter of llm-d's that is accepted, and has no effect here."""


class Parameters(BaseModel):
    """Base of built-in types: their fields are their parameters, and unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def ignored(self) -> list[str]:
        """Return the names of parameters that are given and have no effect."""
        fields = type(self).model_fields
        return [
            name
            for name in sorted(self.model_fields_set)
            if name not in fields or _IGNORED in fields[name].metadata
        ]


P = TypeVar("P", bound=Parameters)


def read_parameters(kind: type[P], name: str, given: Mapping[str, Any]) -> P:
    """Make a plug-in of a built-in type.

    Raises:
        ConfigError: Names each wrong parameter, and those that there are.
    """
    try:
        # As JSON, in which a tuple is a list.
        return kind.model_validate_json(msgspec.json.encode(given))
    except ValidationError as error:
        known = ", ".join(kind.model_fields) or "none"
        problem = in_one_line(error, whole="parameters")
        raise ConfigError(f"plug-in {name!r}: {problem}; its parameters: {known}") from error
