"""A whole configuration, ready to choose: which profile and which decider for which stage. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from epd_portable.config.choice import ELSEWHERE, ChoiceSection, ProfileSection
from epd_portable.delivery.caches import CacheSizes
from epd_portable.errors import ConfigError
from epd_portable.router.choice.catalogue import BUILT_IN, REDUCED, make_plugin, unknown_types
from epd_portable.router.choice.deciders import Fixed, Multimodal
from epd_portable.router.choice.parameters import (
    BuiltIn,
    Ignored,
    NoParameters,
    Parameters,
    read_parameters,
)
from epd_portable.router.choice.prefix import BYTES_A_TOKEN
from epd_portable.router.choice.profile import C, PluginFailures, Profile
from epd_portable.router.choice.scorers import ConsistentHashScorer, EmbeddingsCache, PrefixCache
from epd_portable.router.choice.selection_types import (
    Candidate,
    Decider,
    Decision,
    Filter,
    ScorePicker,
    Scorer,
    SelectionRequest,
    Stage,
)
from epd_portable.router.choice.tokens import ItemTokens

STAGES: tuple[Stage, ...] = ("decode", "encode", "prefill")
BLOCK_TOKENS = 64
MOST_BLOCKS = 2048
KEPT_BLOCKS = 31_250
KEPT_ITEMS = 2048

PluginName = Annotated[str, Field(min_length=1)]


# Profile handlers.


class Handler(NamedTuple):
    """What a profile handler says.

    Attributes:
        profiles: Names, by stage.
        deciders: Names, by stage: empty for never; a stage that is not in it is always done apart.
        header: That names the profile for one request, in lower case; or empty.
    """

    profiles: Mapping[Stage, str]
    deciders: Mapping[Stage, str]
    header: str = ""


_NEVER: Mapping[Stage, str] = {"encode": "", "prefill": ""}


class _OfStages(Parameters):
    encode: PluginName | None = None
    prefill: PluginName | None = None
    decode: PluginName | None = None


class _ProfileNames(_OfStages):
    fallback: Ignored = None


class _Disagg(Parameters):
    profiles: _ProfileNames = _ProfileNames()
    deciders: _OfStages = _OfStages()
    stageOrder: Literal["decode-first", "prefill-first"] = "decode-first"

    def ignored(self) -> list[str]:
        """See `Parameters`: the instance that decodes is chosen first in any case."""
        order = ["stageOrder"] if self.stageOrder != "decode-first" else []
        return order + [f"profiles.{name}" for name in self.profiles.ignored()]

    def handler(self) -> Handler:
        """Return what it says; a stage without a decider is not done apart."""
        return Handler(
            {stage: getattr(self.profiles, stage) or stage for stage in STAGES},
            {"encode": self.deciders.encode or "", "prefill": self.deciders.prefill or ""},
        )


class _Epd(Parameters):
    encodeProfile: PluginName = "encode"
    prefillProfile: PluginName = "prefill"
    decodeProfile: PluginName = "decode"
    deciderPluginName: PluginName | None = None
    primaryPort: Ignored = None

    def handler(self) -> Handler:
        """Return what it says; its decider is for ``encode``."""
        return Handler(
            {
                "encode": self.encodeProfile,
                "prefill": self.prefillProfile,
                "decode": self.decodeProfile,
            },
            {} if self.deciderPluginName is None else {"encode": self.deciderPluginName},
        )


class _ByHeader(Parameters):
    headerName: PluginName = "EPP-Profile"
    defaultProfile: PluginName = "decode"

    def handler(self) -> Handler:
        """Return what it says; a request's header names the profile for its answer."""
        return Handler({"decode": self.defaultProfile}, _NEVER, self.headerName.strip().lower())


class _Single(NoParameters):
    def handler(self) -> Handler:
        """Return what it says: no stage is done apart."""
        return Handler({}, _NEVER)


HANDLERS: Mapping[str, type[_Disagg | _Epd | _ByHeader | _Single]] = {
    "disagg-profile-handler": _Disagg,
    "epd-profile-handler": _Epd,
    "header-profile-handler": _ByHeader,
    "single-profile-handler": _Single,
}


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
        wants_loads: Whether instances are to report how busy they are.
        block_bytes: Of one block.
        most_blocks: Of one prompt.
        cache_sizes: Of an instance.
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
        self._failures = PluginFailures("deciders")
        if problem := unknown_types((each.type for each in section.plugins), HANDLERS):
            raise ConfigError(problem)
        handlers: list[Handler] = []
        for each in section.plugins:
            kind, name, given = each.type, each.known_as, each.parameters or {}
            if kind in HANDLERS:
                parameters = read_parameters(HANDLERS[kind], name, given)
                handlers.append(parameters.handler())
                self._note_ignored(name, parameters)
                continue
            one = self._made[name] = make_plugin(kind, name, given)
            self.wants_blocks |= bool(getattr(one, "wants_blocks", kind not in BUILT_IN))
            self.wants_loads |= bool(getattr(one, "wants_loads", kind not in BUILT_IN))
            if isinstance(one, BuiltIn):
                self._note_ignored(name, one.p)
            if kind in REDUCED:
                self.notes.append(f"plug-in {name}: {REDUCED[kind]}")
        if len(handlers) > 1:
            raise ConfigError(f"{len(handlers)} profile handlers are given: keep one")
        self._profiles = {each.name: self._profile(each) for each in section.schedulingProfiles}
        handler = handlers[0] if handlers else Handler({}, {})
        # Of one profile there is nothing to choose.
        self.profile_header = handler.header if len(self._profiles) > 1 else ""
        self._stages = self._profiles_of_stages(handler)
        self._deciders = {stage: self._decider(handler, stage) for stage in STAGES}
        self._read_sizes()

    @property
    def stages(self) -> Mapping[Stage, str]:
        """The name of the profile of each stage that has one."""
        return {stage: profile.name for stage, profile in self._stages.items()}

    def choose(
        self, request: SelectionRequest, candidates: Sequence[C], decision: Decision | None = None
    ) -> C | None:
        """Return the candidate for a request's stage; ``None`` for none.

        A stage without a profile, which the deciders or the instances' abilities may ask for all
        the same, is chosen for as by default: by key, among those with room.
        """
        profile = self._stages.get(request.stage, _DEFAULT)
        if request.profile:
            if request.profile not in self._profiles:
                if decision is not None:
                    decision.reason = f"there is no profile {request.profile[:64]!r}"
                return None
            profile = self._profiles[request.profile]
        return profile.choose(request, candidates, decision)

    def why_together(self, request: SelectionRequest, decode: Candidate | None) -> str:
        """Return why a stage is not done apart from decoding; empty if it is.

        It is not, if the decider raises.
        """
        name, decider = self._deciders[request.stage]
        try:
            apart = decider.disaggregate(request, decode)
        except Exception as error:
            self._failures.log(name, repr(error))
            return f"{name} has failed"
        return "" if apart else f"{name or 'the handler'} decides so"

    def _note_ignored(self, name: str, given: Parameters) -> None:
        if ignored := given.ignored():
            have = "have" if len(ignored) > 1 else "has"
            what = ", ".join(ignored)
            self.notes.append(f"plug-in {name}: {what} {have} no effect in this router")

    def _profile(self, section: ProfileSection) -> Profile:
        filters: dict[str, Filter] = {}
        scorers: dict[str, tuple[Scorer, float]] = {}
        pickers: dict[str, ScorePicker] = {}
        for use in section.plugins:
            name = use.pluginRef
            one = self._named(name, f"profile {section.name!r}")
            if isinstance(one, Filter):
                filters[name] = one
            if isinstance(one, Scorer):
                scorers[name] = (one, 1.0 if use.weight is None else use.weight)
            if isinstance(one, ScorePicker):
                pickers[name] = one
            if not isinstance(one, Filter | Scorer | ScorePicker):
                raise ConfigError(
                    f"profile {section.name!r}: {name!r} is no filter, scorer or picker; name it "
                    "in the handler's parameters, or leave it out"
                )
        if len(pickers) > 1:
            first, second, *_ = pickers
            raise ConfigError(
                f"profile {section.name!r} has two pickers, {first} and {second}: keep one"
            )
        picker = next(iter(pickers.items()), None)
        return Profile(section.name, filters, scorers, picker, trusted=self._built_in)

    def _named(self, name: str, where: str) -> object:
        if name not in self._made:
            known = ", ".join(self._made) or "none"
            raise ConfigError(f"{where} names plug-in {name!r}, which plugins lack: {known}")
        return self._made[name]

    def _profiles_of_stages(self, handler: Handler) -> dict[Stage, Profile]:
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

    def _decider(self, handler: Handler, stage: Stage) -> tuple[str, Decider]:
        name = handler.deciders.get(stage)
        if not name:
            return "", Fixed(name is None and stage in self._stages)
        one = self._named(name, f"the handler's decider for {stage}")
        if not isinstance(one, Decider):
            raise ConfigError(f"{name!r} is no decider: it cannot decide for {stage}")
        if stage not in self._stages:
            raise ConfigError(
                f"{name!r} decides for {stage}, which no profile is for: add one of that name to "
                "schedulingProfiles"
            )
        return name, one

    def _read_sizes(self) -> None:
        given: list[Any] = [one.p for one in self._made.values() if isinstance(one, BuiltIn)]
        prefixes = [each for each in given if isinstance(each, PrefixCache)]
        block = next((each.block_tokens for each in prefixes if each.block_tokens), BLOCK_TOKENS)
        self.block_bytes = block * BYTES_A_TOKEN
        self.most_blocks = _first((each.most_blocks(block) for each in prefixes), MOST_BLOCKS)
        items = (each.items for each in given if isinstance(each, EmbeddingsCache))
        blocks = (each.lruCapacityPerServer for each in prefixes)
        self.cache_sizes = CacheSizes(
            items=_first(items, KEPT_ITEMS), blocks=_first(blocks, KEPT_BLOCKS)
        )
        estimates = (each for each in given if isinstance(each, ItemTokens))
        self.item_tokens = next(estimates, ItemTokens()).of
        timeouts = (each.encoderTimeout for each in given if isinstance(each, Multimodal))
        timeout_ms = _first(timeouts, 0)
        self.encode_timeout_s = timeout_ms / 1000 if timeout_ms else None


def _first(values: Iterable[int | None], default: int) -> int:
    return next(filter(None, values), default)
