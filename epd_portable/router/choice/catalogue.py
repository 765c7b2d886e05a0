"""The types of plug-ins that there are: built-in ones by name, users' by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from pydantic import ConfigDict

from epd_portable.errors import ConfigError
from epd_portable.router.choice import deciders, filters, pickers, scorers, tokens
from epd_portable.router.choice.plugin import (
    BuiltIn,
    Decider,
    Factory,
    Filter,
    Parameters,
    ScorePicker,
    Scorer,
)

GROUP = "epd_portable.choice_plugins"
"""Entry points of this group are types: name = what makes such a plug-in."""


class Anything(Parameters):
    """Of what feeds others in llm-d; nothing has to be done for it here."""

    model_config = ConfigDict(extra="allow")


class Source(BuiltIn[Anything]):
    """Feeds others in llm-d. The router reads prompts and items, and counts load, by itself."""

    takes = Anything


class PrefixSource(BuiltIn[scorers.PrefixCache]):
    """Says of prefix caches what ``prefix-cache-scorer`` says."""

    takes = scorers.PrefixCache


class EmbeddingsSource(BuiltIn[scorers.EmbeddingsCache]):
    """Says of encoder caches what ``mm-embeddings-cache-scorer`` says."""

    takes = scorers.EmbeddingsCache


BUILT_IN: Mapping[str, Factory] = {
    # Filters.
    "encode-filter": filters.EncodeFilter,
    "prefill-filter": filters.PrefillFilter,
    "decode-filter": filters.DecodeFilter,
    "by-label": filters.LabelFilter,
    "label-selector-filter": filters.LabelSelectorFilter,
    "by-label-selector": filters.LabelSelectorFilter,
    "encoder-type-filter": filters.EncoderTypeFilter,
    "model-filter": filters.ModelFilter,
    "prefix-cache-affinity-filter": tokens.PrefixAffinityFilter,
    "session-affinity-filter": filters.SessionAffinityFilter,
    "context-length-aware": tokens.ContextLengthAware,
    # Scorers.
    "active-request-scorer": scorers.ActiveRequestScorer,
    "queue-scorer": scorers.QueueScorer,
    "running-requests-size-scorer": scorers.RunningScorer,
    "load-aware-scorer": scorers.LoadAwareScorer,
    "kv-cache-utilization-scorer": scorers.KvCacheScorer,
    "encode-load-scorer": scorers.EncodeLoadScorer,
    "encode-pixels-scorer": scorers.EncodePixelsScorer,
    "encode-time-scorer": scorers.EncodeTimeScorer,
    "token-load-scorer": tokens.TokenLoadScorer,
    "no-hit-lru-scorer": tokens.NoHitLruScorer,
    "prefix-cache-scorer": scorers.PrefixCacheScorer,
    "precise-prefix-cache-scorer": scorers.PrefixCacheScorer,
    "mm-embeddings-cache-scorer": scorers.EmbeddingsCacheScorer,
    "session-affinity-scorer": scorers.SessionAffinityScorer,
    "consistent-hash-scorer": scorers.ConsistentHashScorer,
    "weight-scorer": scorers.WeightScorer,
    # Pickers.
    "max-score-picker": pickers.MaxScorePicker,
    "weighted-random-picker": pickers.WeightedRandomPicker,
    "random-picker": pickers.RandomPicker,
    # Deciders.
    "always-disagg-multimodal-decider": deciders.AlwaysDecider,
    "always-disagg-pd-decider": deciders.AlwaysDecider,
    "multimodal-epd-decider": deciders.MultimodalDecider,
    "prefix-based-pd-decider": deciders.PrefixBasedDecider,
    # What feeds others in llm-d.
    "approx-prefix-cache-producer": PrefixSource,
    "precise-prefix-cache-producer": PrefixSource,
    "mm-embeddings-cache-producer": EmbeddingsSource,
    "token-producer": tokens.TokenSource,
    **dict.fromkeys(
        (
            *("inflight-load-producer", "session-id-producer", "metrics-data-source"),
            *("core-metrics-extractor", "endpoint-notification-source", "disagg-headers-handler"),
        ),
        Source,
    ),
}
"""Types and what makes them; those of handlers are in `epd_portable.router.choice.policy`."""

WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        ("precise-prefix-cache-scorer", "precise-prefix-cache-producer"),
        "what the router has sent counts, not what engines' events say",
    ),
    **dict.fromkeys(
        ("session-affinity-scorer", "session-affinity-filter"),
        "x-session-id names the session, and a hash of it the instance: answers bring no token",
    ),
}
"""Types that do less than their name says, and why; the log says so at the start."""


def users_types() -> dict[str, metadata.EntryPoint]:
    """Return the types that installed packages bring."""
    return {each.name: each for each in metadata.entry_points(group=GROUP)}


def unknown_types(kinds: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return which types there are not, and the nearest that there are; empty if there are all.

    Args:
        kinds: Types.
        others: That are known elsewhere.
    """
    known = [*BUILT_IN, *others, *users_types()]
    said, rest = [], ""
    for kind in dict.fromkeys(kinds):
        if kind in known:
            continue
        near = difflib.get_close_matches(kind[:128], known, n=3, cutoff=0.5)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        said.append(f"plug-in type {kind!r} is not known{hint}")
        rest = rest if near else f"; known are {', '.join(known)}"
    return "; ".join(said) + rest


def make(kind: str, name: str, given: Mapping[str, Any]) -> object:
    """Make a plug-in.

    Args:
        kind: Its type.
        name: Of the plug-in.
        given: Its parameters.

    Raises:
        ConfigError: There is no such type, with the nearest ones; its package does not load; or its
            parameters are wrong.
    """
    factory = BUILT_IN.get(kind)
    if factory is not None:
        return factory(name, given)
    if problem := unknown_types([kind]):
        raise ConfigError(problem)
    return _made_by_user(users_types()[kind], name, given)


def _made_by_user(point: metadata.EntryPoint, name: str, given: Mapping[str, Any]) -> object:
    try:
        made = point.load()(name, given)
    except ConfigError:
        raise
    except Exception as error:
        # Whatever a package of others raises.
        raise ConfigError(
            f"plug-in {name!r} of type {point.name!r} ({point.value}) cannot be made: {error!r}"
        ) from error
    if not isinstance(made, Filter | Scorer | ScorePicker | Decider):
        raise ConfigError(
            f"plug-in {name!r} of type {point.name!r} ({point.value}) is a "
            f"{type(made).__name__} with none of the methods keep, score, pick and apart"
        )
    return made
