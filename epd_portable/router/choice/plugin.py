"""What a plug-in is: a filter, a scorer, a picker, a decider, or what another one is made of.

A user's plug-in is made by what its entry point names, called with its name and its parameters, and
is whatever its methods say: see docs/choice.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError
from epd_portable.router.choice.situation import Contender, Need


@runtime_checkable
class Filter(Protocol):
    """Says who can be chosen at all."""

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """Return those of the contenders that can have it, in their order; perhaps none."""


@runtime_checkable
class Scorer(Protocol):
    """Says who is better."""

    def score(self, need: Need, contenders: Sequence[Contender]) -> Sequence[float]:
        """Return a number from 0 to 1 for each contender; 1 is best."""


@runtime_checkable
class ScorePicker(Protocol):
    """Says who it is."""

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """Return one of the contenders, of whom there is at least one.

        Args:
            need: What is asked.
            contenders: Who is left.
            scores: Of each, all scorers together.
        """


@runtime_checkable
class Decider(Protocol):
    """Says whether a stage gets an instance of its own."""

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """Tell whether the need's stage is done apart from decoding.

        Args:
            need: Of stage ``encode``, with its item, or ``prefill``.
            decode: The instance that was chosen to decode, if there is one.
        """


AnyPlugin = Filter | Scorer | ScorePicker | Decider
Factory = Callable[[str, Mapping[str, Any]], object]
"""Makes a plug-in from its name and its parameters; raises ``ConfigError`` or ``ValueError`` for
those."""


_VAIN = "without effect"
Vain = Annotated[JsonValue, _VAIN]
"""A parameter of llm-d's that is taken, and does nothing here."""


class Parameters(BaseModel):
    """Base of what a built-in type takes: strict, and unknown ones refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def vain(self) -> list[str]:
        """Return the names of those that are given and do nothing."""
        fields = type(self).model_fields
        return [
            name
            for name in sorted(self.model_fields_set)
            if name not in fields or _VAIN in fields[name].metadata
        ]


class NoParameters(Parameters):
    """A type that takes none."""


P = TypeVar("P", bound=Parameters)


class BuiltIn(Generic[P]):
    """Base of built-in types.

    Attributes:
        takes: Their parameters.
        p: Those that were given.
    """

    takes: type[P]

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
