"""The types of plug-ins that there are: built-in ones by name, users' by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from epd_portable.errors import ConfigError
from epd_portable.router.choice import deciders, filters, pickers, scorers
from epd_portable.router.choice.plugin import (
    Decider,
    Factory,
    Filter,
    NoParameters,
    ScorePicker,
    Scorer,
    read_parameters,
)
from epd_portable.router.choice.situation import Stage

GROUP = "epd_portable.choice_plugins"
"""Entry points of this group are types: name = what makes such a plug-in."""


class Source:
    """A plug-in that others are fed by in llm-d, and that nothing has to be done for here.

    The router reads prompts and items, and counts load, by itself.

    Attributes:
        prefix: What it says of prefix caches.
        embeddings: What it says of encoder caches.
    """

    def __init__(
        self,
        prefix: scorers.PrefixCache | None = None,
        embeddings: scorers.EmbeddingsCache | None = None,
    ) -> None:
        self.prefix = prefix
        self.embeddings = embeddings


def _free(name: str, given: Mapping[str, Any]) -> Source:
    return Source()


def _prefix(name: str, given: Mapping[str, Any]) -> Source:
    return Source(prefix=read_parameters(scorers.PrefixCache, name, given))


def _embeddings(name: str, given: Mapping[str, Any]) -> Source:
    return Source(embeddings=read_parameters(scorers.EmbeddingsCache, name, given))


def _stage(stage: Stage) -> Factory:
    def make(name: str, given: Mapping[str, Any]) -> filters.StageFilter:
        read_parameters(NoParameters, name, given)
        return filters.StageFilter(stage)

    return make


def _plain(kind: type[filters.EncoderTypeFilter | scorers.EncodeTimeScorer]) -> Factory:
    def make(name: str, given: Mapping[str, Any]) -> object:
        read_parameters(NoParameters, name, given)
        return kind()

    return make


BUILT_IN: Mapping[str, Factory] = {
    # Filters.
    "encode-filter": _stage("encode"),
    "prefill-filter": _stage("prefill"),
    "decode-filter": _stage("decode"),
    "by-label": filters.LabelFilter,
    "label-selector-filter": filters.LabelSelectorFilter,
    "encoder-type-filter": _plain(filters.EncoderTypeFilter),
    "model-filter": filters.ModelFilter,
    # Scorers.
    "active-request-scorer": scorers.ActiveRequestScorer,
    "queue-scorer": scorers.QueueScorer,
    "running-requests-size-scorer": scorers.RunningScorer,
    "load-aware-scorer": scorers.LoadAwareScorer,
    "kv-cache-utilization-scorer": scorers.KvCacheScorer,
    "encode-load-scorer": scorers.EncodeLoadScorer,
    "encode-pixels-scorer": scorers.EncodePixelsScorer,
    "encode-time-scorer": _plain(scorers.EncodeTimeScorer),
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
    "approx-prefix-cache-producer": _prefix,
    "precise-prefix-cache-producer": _prefix,
    "mm-embeddings-cache-producer": _embeddings,
    "token-producer": _free,
    "inflight-load-producer": _free,
    "session-id-producer": _free,
    "metrics-data-source": _free,
    "core-metrics-extractor": _free,
    "endpoint-notification-source": _free,
    "disagg-headers-handler": _free,
}
"""Types and what makes them; those of handlers are in `epd_portable.router.choice.policy`."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "precise-prefix-cache-scorer": "it scores by what the router has sent, not by engines' events",
}
"""Types that do less than their name says, and why; the log says so at the start."""


def users_types() -> dict[str, metadata.EntryPoint]:
    """Return the types that installed packages bring."""
    return {each.name: each for each in metadata.entry_points(group=GROUP)}


def make(kind: str, name: str, given: Mapping[str, Any], *, others: tuple[str, ...] = ()) -> object:
    """Make a plug-in.

    Args:
        kind: Its type.
        name: Of the plug-in.
        given: Its parameters.
        others: Types that are known elsewhere, to be named as near ones.

    Raises:
        ConfigError: There is no such type, with the nearest ones; its package does not load; or its
            parameters are wrong.
    """
    factory = BUILT_IN.get(kind)
    if factory is not None:
        return factory(name, given)
    found = users_types()
    if kind not in found:
        known = [*BUILT_IN, *others, *found]
        near = difflib.get_close_matches(kind[:128], known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"plug-in type {kind!r} is not known: {hint}")
    return _made_by_user(found[kind], name, given)


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
