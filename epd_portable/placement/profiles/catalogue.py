"""The types of plug-ins that there are: built-in ones by name, users' by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import msgspec
from pydantic import ConfigDict, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError
from epd_portable.placement.profiles import deciders, filters, scorers
from epd_portable.placement.profiles.filters import WITHOUT_EFFECT, Parameters
from epd_portable.placement.profiles.selection_types import Decider, Filter, ScorePicker, Scorer

GROUP = "epd_portable.choice_plugins"
"""Entry points of this group are types: name = what makes such a plug-in."""


class _Source(Parameters):
    """Feeds others in llm-d. The front reads prompts and items, and counts load, by itself."""

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
        "what the front has sent counts, not what engines' events say",
    ),
    **dict.fromkeys(
        ("session-affinity-scorer", "session-affinity-filter"),
        "x-session-id names the session, and a hash of it the instance: answers bring no token",
    ),
}
"""Types that do less than their name says, and why; logged at the start."""


def _users_types() -> dict[str, metadata.EntryPoint]:
    return {each.name: each for each in metadata.entry_points(group=GROUP)}


def check_types(kinds: Iterable[str]) -> None:
    """Check that types are known.

    Raises:
        ConfigError: Names all that are not, each with the nearest known ones.
    """
    known = [*BUILT_IN, *_users_types()]
    problems, rest = [], ""
    for kind in dict.fromkeys(kinds):
        if kind in known:
            continue
        near = difflib.get_close_matches(kind[:128], known, n=3, cutoff=0.5)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        problems.append(f"plug-in type {kind!r} is not known{hint}")
        rest = rest if near else f"; known are {', '.join(known)}"
    if problems:
        raise ConfigError("; ".join(problems) + rest)


def make_plugin(kind: str, name: str, given: Mapping[str, Any]) -> object:
    """Make a plug-in.

    Args:
        name: By which the configuration refers to it.

    Raises:
        ConfigError: The type is not known, its package does not load, or its parameters are wrong.
    """
    if kind in BUILT_IN:
        return _built_in(BUILT_IN[kind], name, given)
    check_types([kind])
    point = _users_types()[kind]
    whose = f"plug-in {name!r} of type {kind!r} ({point.value})"
    try:
        made = point.load()(name, given)
    except ConfigError:
        raise
    except Exception as error:
        # Whatever a package of others raises.
        raise ConfigError(f"{whose} cannot be made: {error!r}") from error
    if not isinstance(made, Filter | Scorer | ScorePicker | Decider):
        raise ConfigError(
            f"{whose} is a {type(made).__name__} with none of the methods keep, score, pick and "
            "disaggregate"
        )
    return made


def _built_in(kind: type[Parameters], name: str, given: Mapping[str, Any]) -> Parameters:
    ignored = WITHOUT_EFFECT.difference(kind.model_fields)
    taken = {key: value for key, value in given.items() if key not in ignored}
    try:
        # As JSON, in which a tuple is a list.
        return kind.model_validate_json(msgspec.json.encode(taken))
    except ValidationError as error:
        known = ", ".join(kind.model_fields) or "none"
        problem = in_one_line(error, whole="parameters")
        raise ConfigError(f"plug-in {name!r}: {problem}; its parameters: {known}") from error
