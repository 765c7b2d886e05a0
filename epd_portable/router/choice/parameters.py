"""Parameters of built-in types of plug-ins, checked as strictly as the rest of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError

Factory = Callable[[str, Mapping[str, Any]], object]
"""Makes a plug-in from its name and its parameters; raises ``ConfigError`` or ``ValueError`` for
those."""
Count = Annotated[int, Field(ge=1)]
Part = Annotated[float, Field(ge=0, le=1, strict=False)]
_IGNORED = "without effect"
Ignored = Annotated[JsonValue, _IGNORED]
"""A parameter of llm-d's that is accepted, and has no effect here."""


class Parameters(BaseModel):
    """Base of what a built-in type takes: strict, and unknown ones refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def ignored(self) -> list[str]:
        """Return the names of those that are given and have no effect."""
        fields = type(self).model_fields
        return [
            name
            for name in sorted(self.model_fields_set)
            if name not in fields or _IGNORED in fields[name].metadata
        ]


class NoParameters(Parameters):
    """A type that takes none."""


P = TypeVar("P", bound=Parameters)


class BuiltIn(Generic[P]):
    """Base of built-in types.

    Attributes:
        takes: Their parameters.
        wants_blocks: Whether they read the prompt as blocks.
        wants_loads: Whether they read what instances report of their load.
        p: The parameters that were given.
    """

    takes: type[P]
    wants_blocks = False
    wants_loads = False

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.p = read_parameters(self.takes, name, given)


def read_parameters(model: type[P], name: str, given: Mapping[str, Any]) -> P:
    """Check a plug-in's parameters.

    Raises:
        ConfigError: Names each wrong one, and those that there are.
    """
    try:
        # As JSON, in which a tuple is a list.
        return model.model_validate_json(msgspec.json.encode(given))
    except ValidationError as error:
        known = ", ".join(model.model_fields) or "none"
        problem = in_one_line(error, whole="parameters")
        raise ConfigError(f"plug-in {name!r}: {problem}; its parameters: {known}") from error
