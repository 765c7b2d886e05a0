"""Filters: who can have it at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from epd_portable.router.choice.plugin import BuiltIn, NoParameters, P, Parameters, Vain
from epd_portable.router.choice.situation import (
    ENCODER_TYPE_LABEL,
    ENCODER_TYPES,
    MODEL_LABEL,
    ROLE_LABEL,
    Contender,
    Need,
    Stage,
    label,
    place,
    stages,
)


class StandingFilter(BuiltIn[P], ABC):
    """Keeps instances by what never changes of them, so that one look at each is enough."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        self._last: dict[Stage, tuple[Sequence[Contender], Sequence[Contender]]] = {}

    @abstractmethod
    def keeps(self, contender: Contender) -> bool:
        """Tell whether a contender is kept."""

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """See `Filter`."""
        last, kept = self._last.get(need.stage, ((), ()))
        # They are compared by identity first, in a moment.
        if last != contenders:
            kept = tuple(filter(self.keeps, contenders))
            self._last[need.stage] = contenders[:], kept
        return kept


class _StageFilter(StandingFilter[NoParameters]):
    takes = NoParameters
    _stage: Stage

    def keeps(self, contender: Contender) -> bool:
        """See `StandingFilter`."""
        return self._stage in stages(label(contender, ROLE_LABEL) or "")


class EncodeFilter(_StageFilter):
    """``encode-filter``: those whose role has the stage."""

    _stage = "encode"


class PrefillFilter(_StageFilter):
    """``prefill-filter``: those whose role has the stage."""

    _stage = "prefill"


class DecodeFilter(_StageFilter):
    """``decode-filter``: those whose role has the stage."""

    _stage = "decode"


class ByLabel(Parameters):
    """Of ``by-label``.

    Attributes:
        label: Whose value is looked at.
        validValues: That are kept.
        allowsNoLabel: Whether those without the label are kept, too.
    """

    label: Annotated[str, Field(min_length=1)]
    validValues: tuple[str, ...] = ()
    allowsNoLabel: bool = False


class LabelFilter(StandingFilter[ByLabel]):
    """``by-label``: those whose label has one of some values."""

    takes = ByLabel

    def keeps(self, contender: Contender) -> bool:
        """See `StandingFilter`."""
        value = label(contender, self.p.label)
        return self.p.allowsNoLabel if value is None else value in self.p.validValues


class Expression(Parameters):
    """One condition of ``label-selector-filter``, as Kubernetes has it."""

    key: Annotated[str, Field(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def holds(self, contender: Contender) -> bool:
        """Tell whether a contender fulfils it."""
        value = label(contender, self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        return (value is not None) == (self.operator == "Exists")


class LabelSelector(Parameters):
    """Of ``label-selector-filter``: all of it must hold."""

    matchLabels: Mapping[str, str] = Field(default_factory=dict)
    matchExpressions: tuple[Expression, ...] = ()


class LabelSelectorFilter(StandingFilter[LabelSelector]):
    """``label-selector-filter``: those whose labels fulfil all conditions."""

    takes = LabelSelector

    def keeps(self, contender: Contender) -> bool:
        """See `StandingFilter`."""
        return all(
            label(contender, key) == value for key, value in self.p.matchLabels.items()
        ) and all(expression.holds(contender) for expression in self.p.matchExpressions)


class EncoderTypeFilter(BuiltIn[NoParameters]):
    """``encoder-type-filter``: those whose encoder takes the item, by ``llm-d.ai/encoder-type``.

    Who has no such label takes everything.
    """

    takes = NoParameters

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """See `Filter`."""
        if need.item is None:
            return contenders
        wanted = ENCODER_TYPES[need.item.modality]
        return [each for each in contenders if takes_type(each, wanted)]


def takes_type(contender: Contender, wanted: frozenset[str]) -> bool:
    """Tell whether a contender has one of some types of encoders, or does not say."""
    value = contender.labels.get(ENCODER_TYPE_LABEL)
    return value is None or not wanted.isdisjoint(map(str.strip, value.split(",")))


class OfModel(Parameters):
    """Of ``model-filter``.

    Attributes:
        label: That names an instance's models, with commas between them.
    """

    label: Annotated[str, Field(min_length=1)] = MODEL_LABEL


class ModelFilter(BuiltIn[OfModel]):
    """``model-filter``: those that serve the model that the client names.

    Who has no such label serves every model; a client that names none can have every instance.
    """

    takes = OfModel

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """See `Filter`."""
        model = need.model
        if not model:
            return contenders
        kept = []
        for each in contenders:
            value = each.labels.get(self.p.label)
            if value is None or model in map(str.strip, value.split(",")):
                kept.append(each)
        return kept


class SessionAffinity(Parameters):
    """Of ``session-affinity-scorer`` and ``session-affinity-filter``: none of them has an effect.

    Attributes:
        headerName: As the next ones: a session's name is in ``x-session-id``, and a hash of it
            leads to an instance, for as long as that is there.
    """

    headerName: Vain = None
    algorithm: Vain = None
    strategy: Vain = None
    profileName: Vain = None
    encodedEndpointHeaderConfig: Vain = None
    sessionIdConfig: Vain = None
    evictionTtlSeconds: Vain = None
    evictionSweepSeconds: Vain = None
    missThreshold: Vain = None


class SessionAffinityFilter(BuiltIn[SessionAffinity]):
    """``session-affinity-filter``: of a session, that one instance that its name leads to."""

    takes = SessionAffinity

    def keep(self, need: Need, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """See `Filter`."""
        if not need.session or not contenders:
            return contenders
        return [max(contenders, key=lambda each: place(need.session, each))]
