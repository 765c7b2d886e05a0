"""The types of plug-ins that there are, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import ConfigDict, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError
from epd_portable.placement.profiles import deciders, filters, scorers
from epd_portable.placement.profiles.filters import WITHOUT_EFFECT, Parameters


class _Source(Parameters):
    """Feeds others in llm-d. The front reads prompts and items, and counts load itself."""

    model_config = ConfigDict(extra="allow")


BUILT_IN: Mapping[str, type[Parameters]] = {
    **filters.TYPES,
    **scorers.TYPES,
    **scorers.PICKERS,
    **deciders.TYPES,
    "approx-prefix-cache-producer": scorers.PrefixCache,
    "precise-prefix-cache-producer": scorers.PrefixCache,
    "mm-embeddings-cache-producer": scorers.EmbeddingsCache,
    **dict.fromkeys(
        (
            *("inflight-load-producer", "session-id-producer", "token-producer"),
            *("metrics-data-source", "core-metrics-extractor", "endpoint-notification-source"),
            "disagg-headers-handler",
        ),
        _Source,
    ),
}

REDUCED: Mapping[str, str] = {
    **dict.fromkeys(
        ("precise-prefix-cache-scorer", "precise-prefix-cache-producer"),
        "what the front has sent counts, not events of engines",
    ),
    **dict.fromkeys(
        ("session-affinity-scorer", "session-affinity-filter"),
        "x-session-id names the session, and a hash of it the instance: responses bring no token",
    ),
}
"""Types that do less than their name promises, and why; logged at the start."""


def check_types(kinds: Iterable[str]) -> None:
    """Check that types are known.

    Raises:
        ConfigError: Names all that are not, each with the nearest known ones.
    """
    problems, rest = [], ""
    for kind in dict.fromkeys(kinds):
        if kind in BUILT_IN:
            continue
        near = difflib.get_close_matches(kind[:128], BUILT_IN, n=3, cutoff=0.5)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        problems.append(f"plug-in type {kind!r} is not known{hint}")
        rest = rest if near else f"; known are {', '.join(BUILT_IN)}"
    if problems:
        raise ConfigError("; ".join(problems) + rest)


def make_plugin(kind: str, name: str, given: Mapping[str, Any]) -> Parameters:
    """Make a plug-in of a known type.

    Args:
        name: By which the configuration refers to it.

    Raises:
        ConfigError: Its parameters are wrong.
    """
    made = BUILT_IN[kind]
    ignored = WITHOUT_EFFECT.difference(made.model_fields)
    taken = {key: value for key, value in given.items() if key not in ignored}
    try:
        # As JSON, in which a tuple is a list.
        return made.model_validate_json(msgspec.json.encode(taken))
    except ValidationError as error:
        known = ", ".join(made.model_fields) or "none"
        problem = in_one_line(error, whole="parameters")
        raise ConfigError(f"plug-in {name!r}: {problem}; its parameters: {known}") from error
