"""A whole configuration, ready to choose: which profile and which decider for which stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from epd_portable.config.choice import ELSEWHERE, ChoiceSection, ProfileSection
from epd_portable.errors import ConfigError
from epd_portable.router.choice.catalogue import BUILT_IN, WITHOUT_EFFECT, make
from epd_portable.router.choice.deciders import AlwaysDecider, MultimodalDecider, NeverDecider
from epd_portable.router.choice.plugin import (
    Decider,
    Filter,
    NoParameters,
    Parameters,
    ScorePicker,
    Scorer,
    read_parameters,
)
from epd_portable.router.choice.profile import C, Decision, Failures, Profile
from epd_portable.router.choice.scorers import (
    BYTES_A_TOKEN,
    ConsistentHashScorer,
    EmbeddingsCache,
    PrefixCache,
)
from epd_portable.router.choice.situation import Contender, Need, Stage

STAGES: tuple[Stage, ...] = ("decode", "encode", "prefill")
BLOCK_TOKENS = 64
MOST_BLOCKS = 256
KEPT_BLOCKS = 31_250
KEPT_ITEMS = 2048

PluginName = Annotated[str, Field(min_length=1)]


class StageNames(Parameters):
    """A name for each stage, where something is said."""

    encode: PluginName | None = None
    prefill: PluginName | None = None
    decode: PluginName | None = None


class Disaggregating(Parameters):
    """Of ``disagg-profile-handler``.

    Attributes:
        profiles: Names of the stages' profiles, if they are not those of the stages.
        deciders: Of ``encode`` and ``prefill``; a stage without one is not done apart.
        stageOrder: Taken, and without effect: the instance that decodes is chosen first.
    """

    profiles: StageNames = StageNames()
    deciders: StageNames = StageNames()
    stageOrder: Literal["decode-first", "prefill-first"] | None = None


class ThreeStages(Parameters):
    """Of ``epd-profile-handler``.

    Attributes:
        encodeProfile: Name of the profile.
        prefillProfile: Name of the profile.
        decodeProfile: Name of the profile.
        deciderPluginName: Decides for ``encode``.
        primaryPort: Taken, and without effect.
    """

    encodeProfile: PluginName = "encode"
    prefillProfile: PluginName = "prefill"
    decodeProfile: PluginName = "decode"
    deciderPluginName: PluginName | None = None
    primaryPort: JsonValue = None


class Handler:
    """What a handler says: by stage, the profile's name and the decider's; an empty one is never.

    Args:
        profiles: By stage.
        deciders: By stage; a stage that is not in it is always done apart.
    """

    def __init__(self, profiles: Mapping[Stage, str], deciders: Mapping[Stage, str]) -> None:
        self.profiles = profiles
        self.deciders = deciders


def _disaggregating(name: str, given: Mapping[str, Any]) -> Handler:
    p = read_parameters(Disaggregating, name, given)
    profiles: dict[Stage, str] = {stage: getattr(p.profiles, stage) or stage for stage in STAGES}
    return Handler(
        profiles, {"encode": p.deciders.encode or "", "prefill": p.deciders.prefill or ""}
    )


def _three_stages(name: str, given: Mapping[str, Any]) -> Handler:
    p = read_parameters(ThreeStages, name, given)
    decider: dict[Stage, str] = (
        {"encode": p.deciderPluginName} if p.deciderPluginName is not None else {}
    )
    return Handler(
        {"encode": p.encodeProfile, "prefill": p.prefillProfile, "decode": p.decodeProfile}, decider
    )


def _single(name: str, given: Mapping[str, Any]) -> Handler:
    read_parameters(NoParameters, name, given)
    return Handler({}, {"encode": "", "prefill": ""})


HANDLERS = {
    "disagg-profile-handler": _disaggregating,
    "epd-profile-handler": _three_stages,
    "single-profile-handler": _single,
}
"""Types of handlers, and what makes them."""


_DEFAULT = Profile(
    "default",
    {},
    {"consistent-hash-scorer": (ConsistentHashScorer("consistent-hash-scorer", {}), 1.0)},
)


class Policy:
    """Chooses instances as a configuration says.

    Args:
        section: Without ``file``.

    Raises:
        ConfigError: A type is not known, a parameter is wrong, or a name leads nowhere.

    Attributes:
        notes: What of the configuration has no effect, for the log.
        encode_timeout_s: Longest time of an encode job, if the configuration says one.
        wants_blocks: Whether prompts are to be cut into blocks.
        wants_loads: Whether instances are to tell how busy they are.
        block_bytes: Of one.
        most_blocks: Of one prompt.
        kept_blocks: That an instance keeps.
        kept_items: That an instance keeps.
    """

    def __init__(self, section: ChoiceSection) -> None:
        assert section.file is None
        self.notes = [
            f"{name} has no effect in this router"
            for name in ELSEWHERE
            if getattr(section, name) not in (None, [], {})
        ]
        self._made: dict[str, object] = {}
        self._built_in = {each.known_as for each in section.plugins if each.type in BUILT_IN}
        self.wants_blocks = False
        self.wants_loads = False
        self._failures = Failures("deciders")
        handlers: list[Handler] = []
        for each in section.plugins:
            kind, name, given = each.type, each.known_as, each.parameters or {}
            if kind in HANDLERS:
                handlers.append(HANDLERS[kind](name, given))
                continue
            self._made[name] = make(kind, name, given, others=tuple(HANDLERS))
            wants = getattr(self._made[name], "wants_blocks", kind not in BUILT_IN)
            self.wants_blocks |= bool(wants)
            wants = getattr(self._made[name], "wants_loads", kind not in BUILT_IN)
            self.wants_loads |= bool(wants)
            if kind in WITHOUT_EFFECT:
                self.notes.append(f"plug-in {name}: {WITHOUT_EFFECT[kind]}")
        if len(handlers) > 1:
            raise ConfigError(f"{len(handlers)} profile handlers are given: keep one")
        self._profiles = {each.name: self._profile(each) for each in section.schedulingProfiles}
        handler = handlers[0] if handlers else Handler({}, {})
        self._stages = self._of_stages(handler)
        self._deciders = self._of_deciders(handler)
        self._measure()

    @property
    def stages(self) -> Mapping[Stage, str]:
        """The name of the profile of each stage that has one."""
        return {stage: profile.name for stage, profile in self._stages.items()}

    def choose(
        self, need: Need, contenders: Sequence[C], decision: Decision | None = None
    ) -> C | None:
        """Return who should have a need's stage; ``None`` for nobody.

        A stage without a profile, which the deciders or the instances' abilities may ask for all
        the same, is chosen for as by default: by key, among those with room.
        """
        return self._stages.get(need.stage, _DEFAULT).choose(need, contenders, decision)

    def apart(self, need: Need, decode: Contender | None) -> str:
        """Return why a stage is not done apart from decoding; empty if it is.

        It is, if the decider raises.
        """
        name, decider = self._deciders[need.stage]
        try:
            apart = decider.apart(need, decode)
        except Exception as error:
            self._failures.say(name, repr(error))
            apart = True
        return "" if apart else f"{name or 'the handler'} decides so"

    def _profile(self, section: ProfileSection) -> Profile:
        filters: dict[str, Filter] = {}
        scorers: dict[str, tuple[Scorer, float]] = {}
        picker: tuple[str, ScorePicker] | None = None
        for use in section.plugins:
            name = use.pluginRef
            one = self._named(name, f"profile {section.name!r}")
            used = False
            if isinstance(one, Filter):
                filters[name] = one
                used = True
            if isinstance(one, Scorer):
                scorers[name] = (one, 1.0 if use.weight is None else use.weight)
                used = True
            if isinstance(one, ScorePicker):
                if picker is not None:
                    raise ConfigError(
                        f"profile {section.name!r} has two pickers, {picker[0]} and {name}: keep "
                        "one"
                    )
                picker = (name, one)
                used = True
            if not used:
                raise ConfigError(
                    f"profile {section.name!r}: {name!r} is no filter, scorer or picker; name it "
                    "in the handler's parameters, or leave it out"
                )
        return Profile(section.name, filters, scorers, picker, trusted=self._built_in)

    def _named(self, name: str, where: str) -> object:
        if name not in self._made:
            known = ", ".join(self._made) or "none"
            raise ConfigError(f"{where} names plug-in {name!r}, which plugins lack: {known}")
        return self._made[name]

    def _of_stages(self, handler: Handler) -> dict[Stage, Profile]:
        profiles = self._profiles
        found: dict[Stage, Profile] = {}
        for stage in STAGES:
            name = handler.profiles.get(stage, stage)
            if name in profiles:
                found[stage] = profiles[name]
            elif name != stage:
                known = ", ".join(profiles)
                raise ConfigError(
                    f"the handler names profile {name!r} for {stage}, which schedulingProfiles "
                    f"lack: {known}"
                )
        if "decode" not in found:
            if len(profiles) != 1:
                raise ConfigError(
                    "no profile is for decode, which every request needs: call one of "
                    f"{', '.join(profiles)} so, or name it in a disagg-profile-handler"
                )
            (found["decode"],) = profiles.values()
        return found

    def _of_deciders(self, handler: Handler) -> dict[Stage, tuple[str, Decider]]:
        found: dict[Stage, tuple[str, Decider]] = {}
        for stage in STAGES:
            name = handler.deciders.get(stage)
            if name is None:
                found[stage] = ("", AlwaysDecider() if stage in self._stages else NeverDecider())
            elif not name:
                found[stage] = ("", NeverDecider())
            else:
                one = self._named(name, f"the handler's decider for {stage}")
                if not isinstance(one, Decider):
                    raise ConfigError(f"{name!r} is no decider: it cannot decide for {stage}")
                if stage not in self._stages:
                    raise ConfigError(
                        f"{name!r} decides for {stage}, which no profile is for: add one of that "
                        "name to schedulingProfiles"
                    )
                found[stage] = (name, one)
        return found

    def _measure(self) -> None:
        prefixes: list[PrefixCache] = []
        caches: list[EmbeddingsCache] = []
        for one in self._made.values():
            if isinstance(prefix := getattr(one, "prefix", None), PrefixCache):
                prefixes.append(prefix)
            if isinstance(cache := getattr(one, "embeddings", None), EmbeddingsCache):
                caches.append(cache)
        block = next((each.block_tokens for each in prefixes if each.block_tokens), BLOCK_TOKENS)
        most = (each.most_blocks(block) for each in prefixes)
        kept = (each.lruCapacityPerServer for each in prefixes)
        self.block_bytes = block * BYTES_A_TOKEN
        self.most_blocks = next(filter(None, most), MOST_BLOCKS)
        self.kept_blocks = next(filter(None, kept), KEPT_BLOCKS)
        self.kept_items = next(filter(None, (each.items for each in caches)), KEPT_ITEMS)
        timeouts = [
            one.encode_timeout_s
            for one in self._made.values()
            if isinstance(one, MultimodalDecider)
        ]
        self.encode_timeout_s = next(filter(None, timeouts), None)
