"""The types of plug-ins that there are: built-in ones by name, users' by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from pydantic import ConfigDict

from epd_portable.errors import ConfigError
from epd_portable.router.choice import deciders, filters, pickers, scorers, tokens
from epd_portable.router.choice.parameters import BuiltIn, Factory, Parameters
from epd_portable.router.choice.selection_types import Decider, Filter, ScorePicker, Scorer

GROUP = "epd_portable.choice_plugins"
"""Entry points of this group are types: name = what makes such a plug-in."""


class _Anything(Parameters):
    model_config = ConfigDict(extra="allow")


class _Source(BuiltIn[_Anything]):
    """Feeds others in llm-d. The router reads prompts and items, and counts load, by itself."""

    takes = _Anything


class _PrefixSource(BuiltIn[scorers.PrefixCache]):
    takes = scorers.PrefixCache


class _EmbeddingsSource(BuiltIn[scorers.EmbeddingsCache]):
    takes = scorers.EmbeddingsCache


BUILT_IN: Mapping[str, Factory] = {
    **filters.TYPES,
    **scorers.TYPES,
    **pickers.TYPES,
    **deciders.TYPES,
    "approx-prefix-cache-producer": _PrefixSource,
    "precise-prefix-cache-producer": _PrefixSource,
    "mm-embeddings-cache-producer": _EmbeddingsSource,
    "token-producer": tokens.TokenSource,
    **dict.fromkeys(
        (
            *("inflight-load-producer", "session-id-producer", "metrics-data-source"),
            *("core-metrics-extractor", "endpoint-notification-source", "disagg-headers-handler"),
        ),
        _Source,
    ),
}
"""Types and what makes them; those of handlers are in `epd_portable.router.choice.policy`."""

REDUCED: Mapping[str, str] = {
    **dict.fromkeys(
        ("precise-prefix-cache-scorer", "precise-prefix-cache-producer"),
        "what the router has sent counts, not what engines' events say",
    ),
    **dict.fromkeys(
        ("session-affinity-scorer", "session-affinity-filter"),
        "x-session-id names the session, and a hash of it the instance: answers bring no token",
    ),
}
"""Types that do less than their name says, and why; logged at the start."""


def _users_types() -> dict[str, metadata.EntryPoint]:
    return {each.name: each for each in metadata.entry_points(group=GROUP)}


def unknown_types(kinds: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return which types are not known, and the nearest known ones; empty if all are known.

    Args:
        kinds: Types.
        others: That are known elsewhere.
    """
    known = [*BUILT_IN, *others, *_users_types()]
    said, rest = [], ""
    for kind in dict.fromkeys(kinds):
        if kind in known:
            continue
        near = difflib.get_close_matches(kind[:128], known, n=3, cutoff=0.5)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        said.append(f"plug-in type {kind!r} is not known{hint}")
        rest = rest if near else f"; known are {', '.join(known)}"
    return "; ".join(said) + rest


def make_plugin(kind: str, name: str, given: Mapping[str, Any]) -> object:
    """Make a plug-in.

    Args:
        kind: Its type.
        name: By which the configuration refers to it.
        given: Its parameters.

    Raises:
        ConfigError: The type is not known, its package does not load, or its parameters are wrong.
    """
    factory = BUILT_IN.get(kind)
    if factory is not None:
        return factory(name, given)
    if problem := unknown_types([kind]):
        raise ConfigError(problem)
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
