"""Deciders and handlers: whether a stage gets an instance of its own, and by which profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from epd_portable.config.roles import Stage
from epd_portable.placement.instances import Instance
from epd_portable.placement.profiles.filters import Count, CountOrZero, Name, Parameters
from epd_portable.placement.profiles.selection_types import SelectionRequest


class _Always(Parameters):
    def disaggregate(self, request: SelectionRequest, decode: Instance | None) -> bool:
        return True


class MultimodalDecider(Parameters):
    """``multimodal-epd-decider``: images of fewer pixels than a square of a side stay.

    Attributes:
        enableEncoding: Whether items are encoded apart at all.
        minImageSize: The side.
        encoderTimeout: Longest time of one encode job, in milliseconds. Without it the item's wait
            at its engine counts, ``transfer.wait_timeout_s``.
    """

    enableEncoding: bool = True
    minImageSize: CountOrZero = 0
    encoderTimeout: Count | None = None

    def disaggregate(self, request: SelectionRequest, decode: Instance | None) -> bool:
        item = request.item
        if not self.enableEncoding or item is None:
            return False
        return item.modality != "image" or not 0 < item.pixels < self.minImageSize**2


class _PrefixBasedDecider(Parameters):
    """Long prompts of which little is cached get an instance of their own.

    Attributes:
        nonCachedTokens: Fewest tokens that the decoding instance would have to compute; 0 for
            never.
        promptTokens: Fewest of the whole prompt.
    """

    wants_blocks: ClassVar[bool] = True

    nonCachedTokens: CountOrZero = 0
    promptTokens: CountOrZero = 0

    def disaggregate(self, request: SelectionRequest, decode: Instance | None) -> bool:
        if not self.nonCachedTokens or request.prompt.tokens < self.promptTokens:
            return False
        cached = sum(request.cached_tokens([] if decode is None else [decode]))
        return request.prompt.tokens - cached >= self.nonCachedTokens


# Which profile and which decider is for which stage.


class Handler(Parameters):
    """Default without a handler: a profile is for the stage that it is named after."""

    def profile_of(self, stage: Stage) -> str:
        """Return the name of a stage's profile."""
        return stage

    def decider_of(self, stage: Stage) -> str | None:
        """Return the name of a stage's decider; empty for never, ``None`` for always."""
        return None


class _SingleProfileHandler(Handler):
    def decider_of(self, stage: Stage) -> str | None:
        return ""


class _DisaggProfileHandler(Handler):
    profiles: Mapping[Stage | Literal["fallback"], Name | None] = {}
    deciders: Mapping[Stage, Name | None] = {}
    stageOrder: Literal["decode-first", "prefill-first"] = "decode-first"

    def ignored(self, given: Iterable[str]) -> list[str]:
        """See `Parameters`: the instance that decodes is chosen first in any case."""
        order = ["stageOrder"] if self.stageOrder != "decode-first" else []
        fallback = ["profiles.fallback"] if "fallback" in self.profiles else []
        return super().ignored(given) + order + fallback

    def profile_of(self, stage: Stage) -> str:
        return self.profiles.get(stage) or stage

    def decider_of(self, stage: Stage) -> str | None:
        return self.deciders.get(stage) or ""


class _EpdProfileHandler(Handler):
    encodeProfile: Name = "encode"
    prefillProfile: Name = "prefill"
    decodeProfile: Name = "decode"
    deciderPluginName: Name | None = None

    def profile_of(self, stage: Stage) -> str:
        return str(getattr(self, f"{stage}Profile"))

    def decider_of(self, stage: Stage) -> str | None:
        return self.deciderPluginName if stage == "encode" else None


TYPES: Mapping[str, type[Parameters]] = {
    "always-disagg-multimodal-decider": _Always,
    "always-disagg-pd-decider": _Always,
    "multimodal-epd-decider": MultimodalDecider,
    "prefix-based-pd-decider": _PrefixBasedDecider,
    "disagg-profile-handler": _DisaggProfileHandler,
    "epd-profile-handler": _EpdProfileHandler,
    "single-profile-handler": _SingleProfileHandler,
}
