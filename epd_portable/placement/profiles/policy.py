"""A whole configuration, ready to choose: the profile and the decider of each stage. Pure.

A profile chooses for one stage: filters, then scorers, then a picker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import TypeVar

from epd_portable.config.choice import ELSEWHERE, ChoiceSection, ProfileSection
from epd_portable.config.roles import Stage
from epd_portable.errors import ConfigError
from epd_portable.placement.estimates import CacheSizes
from epd_portable.placement.instances import Instance
from epd_portable.placement.profiles.catalogue import REDUCED, check_types, make_plugin
from epd_portable.placement.profiles.deciders import Handler, MultimodalDecider
from epd_portable.placement.profiles.filters import Parameters
from epd_portable.placement.profiles.scorers import (
    ConsistentHashScorer,
    EmbeddingsCache,
    MaxScorePicker,
    PrefixCache,
)
from epd_portable.placement.profiles.selection_types import (
    Candidates,
    Decider,
    Decision,
    Filter,
    ScorePicker,
    Scorer,
    SelectionRequest,
)

STAGES: tuple[Stage, ...] = ("decode", "encode", "prefill")
BLOCK_TOKENS = 64
MOST_BLOCKS = 2048

T = TypeVar("T")


@dataclass(slots=True)
class Profile:
    """Chooses for one stage.

    Attributes:
        filters: By name, in their order.
        scorers: By name, with their weights.
        picker: By default the best one is picked.
    """

    name: str
    filters: Mapping[str, Filter]
    scorers: Mapping[str, tuple[Scorer, float]]
    picker: ScorePicker = field(default_factory=MaxScorePicker)

    def choose(
        self, request: SelectionRequest, candidates: Candidates, decision: Decision | None = None
    ) -> Instance | None:
        """Return the candidate that should have it.

        Args:
            decision: Gets the reasons, if given.

        Returns:
            One of the candidates; ``None`` if there is none, or filters leave none.
        """
        is_explained = decision is not None
        decision = decision or Decision(stage=request.stage)
        decision.profile = self.name
        decision.filters["there"] = len(candidates)
        left = candidates
        for name, one in self.filters.items():
            if left:
                left = one.keep(request, left)
                decision.filters[name] = len(left)
        if not left:
            decision.reason = "no instance is left" if candidates else "there is no instance"
            return None
        totals = self._scored(request, left, decision)
        chosen = self.picker.pick(request, left, totals)
        if is_explained:
            decision.totals = {each.name: one for each, one in zip(left, totals, strict=True)}
            decision.winner = chosen.name
        return chosen

    def _scored(
        self, request: SelectionRequest, candidates: Candidates, decision: Decision
    ) -> list[float]:
        totals = [0.0] * len(candidates)
        for name, (one, weight) in self.scorers.items():
            scores = one.score(request, candidates)
            weighted = [*scores] if weight == 1 else [weight * score for score in scores]
            decision.scores[name] = weighted
            totals = [*map(add, totals, weighted)]
        return totals


class Policy:
    """Chooses instances by a configuration.

    Args:
        section: Without ``file``.

    Raises:
        ConfigError: A type is not known, a parameter is wrong, or a name leads nowhere.

    Attributes:
        stages: The profile of each stage that has one.
        notes: What of the configuration has no effect, for the log.
        encode_timeout_s: Longest time of an encode job, if the configuration sets one.
        wants_blocks: Whether prompts are to be cut into blocks.
        block_tokens: Size of a block.
        most_blocks: Blocks of a prompt that are compared.
        wants_loads: Whether instances are to report how busy they are.
    """

    def __init__(self, section: ChoiceSection) -> None:
        assert section.file is None
        check_types(each.type for each in section.plugins)
        self._plugins = {
            each.known_as: make_plugin(each.type, each.known_as, each.parameters or {})
            for each in section.plugins
        }
        self.notes = [*_without_effect(section, self._plugins)]
        self.wants_blocks = self._wanted("wants_blocks")
        self.wants_loads = self._wanted("wants_loads")
        handlers = self._made(Handler)
        if len(handlers) > 1:
            raise ConfigError(f"{len(handlers)} profile handlers are given: keep one")
        self._handler = handlers[0] if handlers else Handler()
        self._profiles = {each.name: self._profile(each) for each in section.schedulingProfiles}
        self._default = Profile(
            "default", {}, {"consistent-hash-scorer": (ConsistentHashScorer(), 1.0)}
        )
        self.stages = self._profiles_of_stages()
        self._deciders = {
            stage: self._decider(name, stage)
            for stage in STAGES[1:]
            if (name := self._handler.decider_of(stage))
        }

        prefixes = self._made(PrefixCache)
        self.block_tokens = _first((each.block_tokens for each in prefixes), BLOCK_TOKENS)
        longest = (each.most_blocks(self.block_tokens) for each in prefixes)
        self.most_blocks = _first(longest, MOST_BLOCKS)
        usual, items = CacheSizes(), (each.items for each in self._made(EmbeddingsCache))
        self.cache_sizes = CacheSizes(
            items=_first(items, usual.items),
            blocks=_first((each.lruCapacityPerServer for each in prefixes), usual.blocks),
        )
        timeouts = (each.encoderTimeout for each in self._made(MultimodalDecider))
        timeout_ms = _first(timeouts, 0)
        self.encode_timeout_s = timeout_ms / 1000 if timeout_ms else None

    def choose(
        self, request: SelectionRequest, candidates: Candidates, decision: Decision | None = None
    ) -> Instance | None:
        """Return the candidate for a request's stage; ``None`` for none.

        A stage without a profile, which the deciders or the instances' abilities may require all
        the same, is chosen for as by default: by key, among those with space.
        """
        profile = self.stages.get(request.stage, self._default)
        return profile.choose(request, candidates, decision)

    def why_together(self, request: SelectionRequest, decode: Instance | None) -> str:
        """Return why a stage gets no instance of its own; empty if it does."""
        stage = request.stage
        name = self._handler.decider_of(stage)
        if not name:
            disaggregates = name is None and stage in self.stages
            return "" if disaggregates else "the handler decides so"
        disaggregates = self._deciders[stage].disaggregate(request, decode)
        return "" if disaggregates else f"{name} decides so"

    def _wanted(self, what: str) -> bool:
        """Return whether a plug-in wants something."""
        return any(getattr(one, what, False) for one in self._plugins.values())

    def _made(self, kind: type[T]) -> list[T]:
        return [each for each in self._plugins.values() if isinstance(each, kind)]

    def _profile(self, section: ProfileSection) -> Profile:
        where = f"profile {section.name!r}"
        filters: dict[str, Filter] = {}
        scorers: dict[str, tuple[Scorer, float]] = {}
        pickers: dict[str, ScorePicker] = {}
        for use in section.plugins:
            name = use.pluginRef
            one = self._named(name, where)
            if isinstance(one, Filter):
                filters[name] = one
            if isinstance(one, Scorer):
                scorers[name] = (one, 1.0 if use.weight is None else use.weight)
            if isinstance(one, ScorePicker):
                pickers[name] = one
            if not isinstance(one, Filter | Scorer | ScorePicker):
                raise ConfigError(
                    f"{where}: {name!r} is no filter, scorer or picker; name it in the handler's "
                    "parameters, or leave it out"
                )
        if len(pickers) > 1:
            raise ConfigError(f"{where} has two pickers, {' and '.join(pickers)}: keep one")
        return Profile(section.name, filters, scorers, *pickers.values())

    def _named(self, name: str, where: str) -> object:
        if name not in self._plugins:
            known = ", ".join(self._plugins) or "none"
            raise ConfigError(f"{where} names plug-in {name!r}, which plugins lack: {known}")
        return self._plugins[name]

    def _profiles_of_stages(self) -> dict[Stage, Profile]:
        profiles, known = self._profiles, ", ".join(self._profiles)
        found: dict[Stage, Profile] = {}
        for stage in STAGES:
            name = self._handler.profile_of(stage)
            if name in profiles:
                found[stage] = profiles[name]
            elif name != stage:
                raise ConfigError(
                    f"the handler names profile {name!r} for {stage}, which schedulingProfiles "
                    f"lack: {known}"
                )
        if "decode" not in found:
            if len(profiles) != 1:
                raise ConfigError(
                    "no profile is for decode, which every request needs: call one of "
                    f"{known} so, or name it in a disagg-profile-handler"
                )
            (found["decode"],) = profiles.values()
        return found

    def _decider(self, name: str, stage: Stage) -> Decider:
        one = self._named(name, f"the handler's decider for {stage}")
        if not isinstance(one, Decider):
            raise ConfigError(f"{name!r} is no decider: it cannot decide for {stage}")
        if stage not in self.stages:
            raise ConfigError(
                f"{name!r} decides for {stage}, which no profile is for: add one of that name to "
                "schedulingProfiles"
            )
        return one


def _without_effect(section: ChoiceSection, plugins: Mapping[str, Parameters]) -> Iterable[str]:
    for name in ELSEWHERE:
        if getattr(section, name) not in (None, [], {}):
            yield f"{name} has no effect here"
    for each in section.plugins:
        one = plugins[each.known_as]
        if ignored := one.ignored(each.parameters or ()):
            have = "have" if len(ignored) > 1 else "has"
            yield f"plug-in {each.known_as}: {', '.join(ignored)} {have} no effect here"
        if each.type in REDUCED:
            yield f"plug-in {each.known_as}: {REDUCED[each.type]}"


def _first(values: Iterable[T | None], default: T) -> T:
    return next(filter(None, values), default)
