"""Built-in filters: which candidates are left."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from epd_portable.delivery.ring import HashRing
from epd_portable.media.limits import Modality
from epd_portable.router.choice.parameters import (
    BuiltIn,
    Factory,
    Ignored,
    NoParameters,
    P,
    Parameters,
    Part,
)
from epd_portable.router.choice.selection_types import (
    ROLE_LABEL,
    Candidate,
    Candidates,
    SelectionRequest,
    Stage,
    label,
    stages,
)
from epd_portable.router.choice.tokens import cached_tokens

ENCODER_TYPE_LABEL = "llm-d.ai/encoder-type"
"""``vision``, ``audio`` or ``video``, or several of them with commas."""
MODEL_LABEL = "llm-d.ai/model"
ENCODER_TYPES: Mapping[Modality, frozenset[str]] = {
    "image": frozenset({"vision", "image"}),
    "video": frozenset({"vision", "video"}),
    "audio": frozenset({"audio"}),
}
"""Types of encoders that can have an item, by its modality."""


class _ByLabels(BuiltIn[P], ABC):
    """Keeps candidates by what never changes of them, so that one look at each is enough."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        self._last: dict[Stage, tuple[Candidates, Candidates]] = {}

    @abstractmethod
    def keeps(self, candidate: Candidate) -> bool: ...

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        last, kept = self._last.get(request.stage, ([], []))
        # They are compared by identity first, in a moment.
        if last != candidates:
            kept = [*filter(self.keeps, candidates)]
            self._last[request.stage] = candidates[:], kept
        return kept


class _OfStage(_ByLabels[NoParameters]):
    takes = NoParameters
    stage: Stage

    def keeps(self, candidate: Candidate) -> bool:
        return self.stage in stages(label(candidate, ROLE_LABEL) or "")


class _Encode(_OfStage):
    stage = "encode"


class _Prefill(_OfStage):
    stage = "prefill"


class _Decode(_OfStage):
    stage = "decode"


class _LabelValues(Parameters):
    label: Annotated[str, Field(min_length=1)]
    validValues: tuple[str, ...] = ()
    allowsNoLabel: bool = False


class _ByLabel(_ByLabels[_LabelValues]):
    takes = _LabelValues

    def keeps(self, candidate: Candidate) -> bool:
        value = label(candidate, self.p.label)
        return self.p.allowsNoLabel if value is None else value in self.p.validValues


class _Expression(Parameters):
    key: Annotated[str, Field(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def holds(self, candidate: Candidate) -> bool:
        value = label(candidate, self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        return (value is not None) == (self.operator == "Exists")


class _Selector(Parameters):
    matchLabels: Mapping[str, str] = Field(default_factory=dict)
    matchExpressions: tuple[_Expression, ...] = ()


class _BySelector(_ByLabels[_Selector]):
    """As Kubernetes has it: all conditions must hold."""

    takes = _Selector

    def keeps(self, candidate: Candidate) -> bool:
        return all(
            label(candidate, key) == value for key, value in self.p.matchLabels.items()
        ) and all(expression.holds(candidate) for expression in self.p.matchExpressions)


class _ByEncoderType(BuiltIn[NoParameters]):
    takes = NoParameters

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if request.item is None:
            return candidates
        wanted = ENCODER_TYPES[request.item.modality]
        return [each for each in candidates if takes_type(each, wanted)]


def takes_type(candidate: Candidate, wanted: frozenset[str]) -> bool:
    """Return whether a candidate has one of some types of encoders, or has no such label."""
    return _names_any(candidate.labels.get(ENCODER_TYPE_LABEL), wanted)


def _names_any(value: str | None, wanted: frozenset[str]) -> bool:
    return value is None or not wanted.isdisjoint(map(str.strip, value.split(",")))


class _ModelLabel(Parameters):
    label: Annotated[str, Field(min_length=1)] = MODEL_LABEL


class _ByModel(BuiltIn[_ModelLabel]):
    takes = _ModelLabel

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if not request.model:
            return candidates
        wanted = frozenset({request.model})
        return [each for each in candidates if _names_any(each.labels.get(self.p.label), wanted)]


class SessionAffinity(Parameters):
    """A session's name is in ``x-session-id``, and a hash of it leads to an instance."""

    headerName: Ignored = None
    algorithm: Ignored = None
    strategy: Ignored = None
    profileName: Ignored = None
    encodedEndpointHeaderConfig: Ignored = None
    sessionIdConfig: Ignored = None
    evictionTtlSeconds: Ignored = None
    evictionSweepSeconds: Ignored = None
    missThreshold: Ignored = None


class _BySession(BuiltIn[SessionAffinity]):
    takes = SessionAffinity

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        if not request.session or not candidates:
            return candidates
        return [next(HashRing(candidates).in_order(request.session))]


class _PrefixAffinity(Parameters):
    """Those that have the prompt, unless others are much less busy.

    Attributes:
        affinityThreshold: Part of the prompt from which on an instance counts as having it.
        explorationProbability: How often all are kept all the same.
        maxTTFTPenaltyMs: How much longer those may need for what is in flight; 0 for
            any time.
        ttftSource: Latencies are not predicted here.
        peakPrefillThroughput: Tokens that an instance prefills in a second.
    """

    affinityThreshold: Part = 0.8
    explorationProbability: Part = 0.0
    maxTTFTPenaltyMs: Annotated[float, Field(ge=0, strict=False)] = 18_000.0
    ttftSource: Literal["prefillThroughput"] = "prefillThroughput"
    peakPrefillThroughput: Annotated[float, Field(ge=0, strict=False)] = 15_928.0
    maxTokensInFlightPenalty: Ignored = None
    prefillCalibrationFile: Ignored = None
    prefillCalibrationFingerprint: Ignored = None
    prefillCalibrationRequired: Ignored = None
    prefixMatchInfoProducerName: Ignored = None
    latencyPredictionInfoProducerName: Ignored = None
    inFlightLoadProducerName: Ignored = None

    @model_validator(mode="after")
    def _penalties_need_a_throughput(self) -> _PrefixAffinity:
        if self.maxTTFTPenaltyMs and not self.peakPrefillThroughput:
            raise ValueError("peakPrefillThroughput must be more than 0, or maxTTFTPenaltyMs 0")
        return self


class _ByPrefix(BuiltIn[_PrefixAffinity]):
    takes = _PrefixAffinity
    wants_blocks = True

    def keep(self, request: SelectionRequest, candidates: Candidates) -> Candidates:
        p = self.p
        if not request.blocks or random.random() < p.explorationProbability:
            return candidates
        wanted = p.affinityThreshold * request.up_to(len(request.blocks))
        cached = cached_tokens(request, candidates)
        if max(cached, default=0) < wanted:
            return candidates
        pairs = [*zip(candidates, cached, strict=True)]
        having = [each for each, tokens in pairs if tokens >= wanted]
        others = [each for each, tokens in pairs if tokens < wanted]
        if others and p.maxTTFTPenaltyMs:
            more = min(map(_in_flight, having)) - min(map(_in_flight, others))
            if more / p.peakPrefillThroughput * 1000 > p.maxTTFTPenaltyMs:
                return candidates
        return having


def _in_flight(candidate: Candidate) -> float:
    return candidate.tokens / candidate.weight


TYPES: Mapping[str, Factory] = {
    "encode-filter": _Encode,
    "prefill-filter": _Prefill,
    "decode-filter": _Decode,
    "by-label": _ByLabel,
    "label-selector-filter": _BySelector,
    "by-label-selector": _BySelector,
    "encoder-type-filter": _ByEncoderType,
    "model-filter": _ByModel,
    "prefix-cache-affinity-filter": _ByPrefix,
    "session-affinity-filter": _BySession,
}
