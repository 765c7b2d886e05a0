"""A whole configuration, ready to choose: which profile and which decider for which stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from epd_portable.config.choice import ELSEWHERE, ChoiceSection, ProfileSection
from epd_portable.errors import ConfigError
from epd_portable.router.choice.catalogue import (
    BUILT_IN,
    WITHOUT_EFFECT,
    make,
    unknown_types,
)
from epd_portable.router.choice.deciders import AlwaysDecider, MultimodalDecider, NeverDecider
from epd_portable.router.choice.plugin import (
    BuiltIn,
    Decider,
    Filter,
    NoParameters,
    Parameters,
    ScorePicker,
    Scorer,
    Vain,
    read_parameters,
)
from epd_portable.router.choice.prefix import BYTES_A_TOKEN
from epd_portable.router.choice.profile import C, Decision, Failures, Profile
from epd_portable.router.choice.scorers import (
    ConsistentHashScorer,
    EmbeddingsCache,
    PrefixCache,
)
from epd_portable.router.choice.situation import Contender, Need, Stage
from epd_portable.router.choice.tokens import Tokens

STAGES: tuple[Stage, ...] = ("decode", "encode", "prefill")
BLOCK_TOKENS = 64
MOST_BLOCKS = 2048
KEPT_BLOCKS = 31_250
KEPT_ITEMS = 2048

PluginName = Annotated[str, Field(min_length=1)]


class StageNames(Parameters):
    """A name for each stage, where something is said."""

    encode: PluginName | None = None
    prefill: PluginName | None = None
    decode: PluginName | None = None


class ProfileNames(StageNames):
    """Of profiles; none is for what finds nobody."""

    fallback: Vain = None


class Disaggregating(Parameters):
    """Of ``disagg-profile-handler``.

    Attributes:
        profiles: Names of the stages' profiles, if they are not those of the stages.
        deciders: Of ``encode`` and ``prefill``; a stage without one is not done apart.
        stageOrder: The instance that decodes is chosen first in any case.
    """

    profiles: ProfileNames = ProfileNames()
    deciders: StageNames = StageNames()
    stageOrder: Literal["decode-first", "prefill-first"] = "decode-first"

    def vain(self) -> list[str]:
        """See `Parameters`."""
        order = ["stageOrder"] if self.stageOrder != "decode-first" else []
        return order + [f"profiles.{name}" for name in self.profiles.vain()]


class ThreeStages(Parameters):
    """Of ``epd-profile-handler``.

    Attributes:
        encodeProfile: Name of the profile.
        prefillProfile: Name of the profile.
        decodeProfile: Name of the profile.
        deciderPluginName: Decides for ``encode``.
    """

    encodeProfile: PluginName = "encode"
    prefillProfile: PluginName = "prefill"
    decodeProfile: PluginName = "decode"
    deciderPluginName: PluginName | None = None
    primaryPort: Vain = None


class ByHeader(Parameters):
    """Of ``header-profile-handler``.

    Attributes:
        headerName: Of a request, whose value names the profile that chooses who answers.
        defaultProfile: Chooses for requests without it.
    """

    headerName: PluginName = "EPP-Profile"
    defaultProfile: PluginName = "decode"


class Handler(NamedTuple):
    """What a handler says.

    Attributes:
        profiles: Names, by stage.
        deciders: Names, by stage: empty for never; a stage that is not in it is always done apart.
        header: That names the profile for one request, in lower case; or empty.
        given: Its parameters.
    """

    profiles: Mapping[Stage, str]
    deciders: Mapping[Stage, str]
    header: str = ""
    given: Parameters | None = None


_NEVER: Mapping[Stage, str] = {"encode": "", "prefill": ""}


def _disaggregating(name: str, given: Mapping[str, Any]) -> Handler:
    p = read_parameters(Disaggregating, name, given)
    profiles: dict[Stage, str] = {stage: getattr(p.profiles, stage) or stage for stage in STAGES}
    deciders: Mapping[Stage, str] = {
        "encode": p.deciders.encode or "",
        "prefill": p.deciders.prefill or "",
    }
    return Handler(profiles, deciders, given=p)


def _three_stages(name: str, given: Mapping[str, Any]) -> Handler:
    p = read_parameters(ThreeStages, name, given)
    decider: dict[Stage, str] = (
        {"encode": p.deciderPluginName} if p.deciderPluginName is not None else {}
    )
    profiles: Mapping[Stage, str] = {
        "encode": p.encodeProfile,
        "prefill": p.prefillProfile,
        "decode": p.decodeProfile,
    }
    return Handler(profiles, decider, given=p)


def _by_header(name: str, given: Mapping[str, Any]) -> Handler:
    p = read_parameters(ByHeader, name, given)
    return Handler({"decode": p.defaultProfile}, _NEVER, p.headerName.strip().lower())


def _single(name: str, given: Mapping[str, Any]) -> Handler:
    read_parameters(NoParameters, name, given)
    return Handler({}, _NEVER)


HANDLERS = {
    "disagg-profile-handler": _disaggregating,
    "epd-profile-handler": _three_stages,
    "header-profile-handler": _by_header,
    "single-profile-handler": _single,
}
"""Types of handlers, and what makes them."""


_DEFAULT = Profile(
    "default",
    {},
    {"consistent-hash-scorer": (ConsistentHashScorer("consistent-hash-scorer", {}), 1.0)},
    trusted=("consistent-hash-scorer",),
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
        item_tokens: Returns how many tokens an item is taken for.
        profile_header: Header by which a request may name a profile, in lower case; or empty.
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
        if problem := unknown_types((each.type for each in section.plugins), HANDLERS):
            raise ConfigError(problem)
        handlers: list[Handler] = []
        for each in section.plugins:
            kind, name, given = each.type, each.known_as, each.parameters or {}
            if kind in HANDLERS:
                handlers.append(HANDLERS[kind](name, given))
                self._note(name, handlers[-1].given)
                continue
            one = self._made[name] = make(kind, name, given)
            self.wants_blocks |= bool(getattr(one, "wants_blocks", kind not in BUILT_IN))
            self.wants_loads |= bool(getattr(one, "wants_loads", kind not in BUILT_IN))
            self._note(name, one.p if isinstance(one, BuiltIn) else None)
            if kind in WITHOUT_EFFECT:
                self.notes.append(f"plug-in {name}: {WITHOUT_EFFECT[kind]}")
        if len(handlers) > 1:
            raise ConfigError(f"{len(handlers)} profile handlers are given: keep one")
        self._profiles = {each.name: self._profile(each) for each in section.schedulingProfiles}
        handler = handlers[0] if handlers else Handler({}, {})
        # Of one profile there is nothing to choose.
        self.profile_header = handler.header if len(self._profiles) > 1 else ""
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
        profile = self._stages.get(need.stage, _DEFAULT)
        if need.profile:
            if need.profile not in self._profiles:
                if decision is not None:
                    decision.reason = f"there is no profile {need.profile[:64]!r}"
                return None
            profile = self._profiles[need.profile]
        return profile.choose(need, contenders, decision)

    def apart(self, need: Need, decode: Contender | None) -> str:
        """Return why a stage is not done apart from decoding; empty if it is.

        It is not, if the decider raises.
        """
        name, decider = self._deciders[need.stage]
        try:
            apart = decider.apart(need, decode)
        except Exception as error:
            self._failures.say(name, repr(error))
            return f"{name} has failed"
        return "" if apart else f"{name or 'the handler'} decides so"

    def _note(self, name: str, given: Parameters | None) -> None:
        if given is not None and (vain := given.vain()):
            have = "have" if len(vain) > 1 else "has"
            self.notes.append(f"plug-in {name}: {', '.join(vain)} {have} no effect in this router")

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
            elif name != stage and not (handler.header and len(profiles) == 1):
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
                found[stage] = (
                    "",
                    AlwaysDecider("", {}) if stage in self._stages else NeverDecider(),
                )
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
        given = [one.p for one in self._made.values() if isinstance(one, BuiltIn)]
        prefixes = [each for each in given if isinstance(each, PrefixCache)]
        caches = [each for each in given if isinstance(each, EmbeddingsCache)]
        estimates = (each for each in given if isinstance(each, Tokens))
        block = next((each.block_tokens for each in prefixes if each.block_tokens), BLOCK_TOKENS)
        most = (each.most_blocks(block) for each in prefixes)
        kept = (each.lruCapacityPerServer for each in prefixes)
        self.block_bytes = block * BYTES_A_TOKEN
        self.most_blocks = next(filter(None, most), MOST_BLOCKS)
        self.kept_blocks = next(filter(None, kept), KEPT_BLOCKS)
        self.kept_items = next(filter(None, (each.items for each in caches)), KEPT_ITEMS)
        self.item_tokens = next(estimates, Tokens()).of
        timeouts = [
            one.encode_timeout_s
            for one in self._made.values()
            if isinstance(one, MultimodalDecider)
        ]
        self.encode_timeout_s = next(filter(None, timeouts), None)
