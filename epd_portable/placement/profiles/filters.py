"""Built-in types: their base, and filters, which leave out candidates."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from epd_portable.config.roles import ROLE_LABEL, Stage
from epd_portable.media.limits import Modality
from epd_portable.placement.instances import HashRing, Instance
from epd_portable.placement.profiles.selection_types import (
    Candidates,
    SelectionRequest,
    stages,
)

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Part = Annotated[float, Field(ge=0, le=1, strict=False)]
Name = Annotated[str, Field(min_length=1)]
_OF_LLMD = """
algorithm autoTune encodedEndpointHeaderConfig evictionSweepSeconds evictionTtlSeconds headerName
inFlightLoadProducerName indexerConfig kvEventsConfig latencyPredictionInfoProducerName
maxNumOfEndpoints maxTokensInFlightPenalty missThreshold nonTextTokenWeight
prefillCalibrationFile prefillCalibrationFingerprint prefillCalibrationRequired
prefixMatchInfoProducerName prefixPluginName prefixPluginType primaryPort profileName
requestTimeout reusableTokensProducerName sessionIdConfig speculativeIndexing strategy
tokenProcessorConfig
"""
WITHOUT_EFFECT = frozenset(_OF_LLMD.split())
"""Parameters of llm-d's types that are taken, and have no effect here."""


class Parameters(BaseModel):
    """Base of built-in types: their fields are their parameters, and unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def ignored(self, given: Iterable[str]) -> list[str]:
        """Return which of the parameters that it was made with have no effect."""
        return sorted(set(given).difference(type(self).model_fields))


ENCODER_TYPE_LABEL = "llm-d.ai/encoder-type"
"""``vision``, ``audio`` or ``video``, or several of them with commas."""
MODEL_LABEL = "llm-d.ai/model"
ENCODER_TYPES: Mapping[Modality, frozenset[str]] = {
    "image": frozenset({"vision", "image"}),
    "video": frozenset({"vision", "video"}),
    "audio": frozenset({"audio"}),
}
"""Types of encoders that can have an item, by its modality."""


class _OfStage(Parameters):
    stage: ClassVar[Stage]

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        roles = [each.labels.get(ROLE_LABEL) or each.role for each in candidates]
        fitting = {role for role in set(roles) if self.stage in stages(role)}
        if fitting.issuperset(roles):
            return candidates
        return [each for each, role in zip(candidates, roles, strict=True) if role in fitting]


class _EncodeFilter(_OfStage):
    stage = "encode"


class _PrefillFilter(_OfStage):
    stage = "prefill"


class _DecodeFilter(_OfStage):
    stage = "decode"


class _ByLabel(Parameters):
    label: Name
    validValues: tuple[str, ...] = ()
    allowsNoLabel: bool = False

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        return [each for each in candidates if self._keeps(each.labels.get(self.label))]

    def _keeps(self, value: str | None) -> bool:
        return self.allowsNoLabel if value is None else value in self.validValues


class _Expression(Parameters):
    key: Name
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def holds(self, candidate: Instance) -> bool:
        value = candidate.labels.get(self.key)
        if self.operator in ("In", "NotIn"):
            return (value in self.values) == (self.operator == "In")
        return (value is not None) == (self.operator == "Exists")


class _BySelector(Parameters):
    """Label selector of Kubernetes: all conditions must hold."""

    matchLabels: Mapping[str, str] = Field(default_factory=dict)
    matchExpressions: tuple[_Expression, ...] = ()

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        return [
            each
            for each in candidates
            if all(each.labels.get(key) == value for key, value in self.matchLabels.items())
            and all(expression.holds(each) for expression in self.matchExpressions)
        ]


class _ByEncoderType(Parameters):
    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if request.item is None:
            return candidates
        wanted = ENCODER_TYPES[request.item.modality]
        return [each for each in candidates if takes_type(each, wanted)]


class _ByModel(Parameters):
    label: Name = MODEL_LABEL

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if not request.model:
            return candidates
        wanted = frozenset({request.model})
        return [each for each in candidates if _names_any(each.labels.get(self.label), wanted)]


def takes_type(candidate: Instance, wanted: frozenset[str]) -> bool:
    """Return whether a candidate has one of some types of encoders, or has no such label."""
    return _names_any(candidate.labels.get(ENCODER_TYPE_LABEL), wanted)


def _names_any(value: str | None, wanted: frozenset[str]) -> bool:
    return value is None or not wanted.isdisjoint(map(str.strip, value.split(",")))


class OnRing(Parameters):
    """Base of types that choose by a hash: the ring is kept while the candidates are the same."""

    _rings: dict[Stage, tuple[Candidates, HashRing[Instance]]] = PrivateAttr(default_factory=dict)

    def ring(self, stage: Stage, candidates: Candidates) -> HashRing[Instance]:
        """Return the ring of some candidates."""
        last, ring = self._rings.get(stage, ([], None))
        if ring is None or last != candidates:
            ring = HashRing(candidates)
            self._rings[stage] = candidates[:], ring
        return ring


class SessionAffinity(OnRing):
    """A session's name is in ``x-session-id``, and a hash of it leads to an instance."""

    def own(self, request: SelectionRequest, candidates: Candidates) -> Instance | None:
        """Return the candidate of a request's session; ``None`` if it has none."""
        if not request.session:
            return None
        return next(self.ring(request.stage, candidates).in_order(request.session), None)


class _BySession(SessionAffinity):
    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        own = self.own(request, candidates)
        return candidates if own is None else [own]


class _ByPrefix(Parameters):
    """Filter for candidates that have the prompt, unless others are much less busy.

    Attributes:
        affinityThreshold: Part of the prompt from which on an instance counts as having it.
        explorationProbability: How often all are kept all the same.
        maxTTFTPenaltyMs: How much longer those may need for what is in flight; 0 for
            any time.
        ttftSource: Latencies are not predicted here.
        peakPrefillThroughput: Tokens that an instance prefills in a second.
    """

    wants_blocks: ClassVar[bool] = True

    affinityThreshold: Part = 0.8
    explorationProbability: Part = 0.0
    maxTTFTPenaltyMs: Annotated[float, Field(ge=0, strict=False)] = 18_000.0
    ttftSource: Literal["prefillThroughput"] = "prefillThroughput"
    peakPrefillThroughput: Annotated[float, Field(ge=0, strict=False)] = 15_928.0

    @model_validator(mode="after")
    def _penalties_need_a_throughput(self) -> _ByPrefix:
        if self.maxTTFTPenaltyMs and not self.peakPrefillThroughput:
            raise ValueError("peakPrefillThroughput must be more than 0, or maxTTFTPenaltyMs 0")
        return self

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if not request.blocks or random.random() < self.explorationProbability:
            return candidates
        wanted = self.affinityThreshold * request.prompt.up_to(len(request.blocks))
        pairs = [*zip(candidates, request.cached_tokens(candidates), strict=True)]
        having = [each for each, tokens in pairs if tokens >= wanted]
        others = [each for each, tokens in pairs if tokens < wanted]
        if not having:
            return candidates
        if others and self.maxTTFTPenaltyMs:
            more = min(map(_in_flight, having)) - min(map(_in_flight, others))
            if more / self.peakPrefillThroughput * 1000 > self.maxTTFTPenaltyMs:
                return candidates
        return having


def _in_flight(candidate: Instance) -> float:
    return candidate.tokens / candidate.weight


TYPES: Mapping[str, type[Parameters]] = {
    "encode-filter": _EncodeFilter,
    "prefill-filter": _PrefillFilter,
    "decode-filter": _DecodeFilter,
    "by-label": _ByLabel,
    "label-selector-filter": _BySelector,
    "by-label-selector": _BySelector,
    "encoder-type-filter": _ByEncoderType,
    "model-filter": _ByModel,
    "prefix-cache-affinity-filter": _ByPrefix,
    "session-affinity-filter": _BySession,
}
