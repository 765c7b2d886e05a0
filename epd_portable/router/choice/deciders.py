"""Built-in deciders: whether a stage gets an instance of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from epd_portable.router.choice.parameters import BuiltIn, Count, Factory, NoParameters, Parameters
from epd_portable.router.choice.selection_types import Candidate, SelectionRequest
from epd_portable.router.choice.tokens import cached_tokens


class Fixed:
    """The same for every request: for a stage for which the configuration names no decider."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        """See `Decider`."""
        return self._answer


class _Always(BuiltIn[NoParameters]):
    takes = NoParameters

    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        return True


class Multimodal(Parameters):
    """Of ``multimodal-epd-decider``: pictures of fewer pixels than a square of a side stay.

    Attributes:
        enableEncoding: Whether items are encoded apart at all.
        minImageSize: The side.
        encoderTimeout: Milliseconds that one encode job may take, in place of
            half of ``transfer.wait_timeout_s``.
    """

    enableEncoding: bool = True
    minImageSize: Annotated[int, Field(ge=0)] = 0
    encoderTimeout: Count | None = None


class _MultimodalDecider(BuiltIn[Multimodal]):
    takes = Multimodal

    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        item = request.item
        if not self.p.enableEncoding or item is None:
            return False
        is_small = item.modality == "image" and 0 < item.pixels < self.p.minImageSize**2
        return not is_small


class _PrefixBased(Parameters):
    """Long prompts of which little is cached get an instance of their own.

    Attributes:
        nonCachedTokens: Fewest tokens that the decoding instance would have to compute; 0 for
            never.
        promptTokens: Fewest of the whole prompt.
    """

    nonCachedTokens: Annotated[int, Field(ge=0)] = 0
    promptTokens: Annotated[int, Field(ge=0)] = 0


class _PrefixBasedDecider(BuiltIn[_PrefixBased]):
    takes = _PrefixBased
    wants_blocks = True

    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        wanted = self.p.nonCachedTokens
        if not wanted or request.tokens < self.p.promptTokens:
            return False
        cached = cached_tokens(request, [decode])[0] if decode is not None else 0
        return request.tokens - cached >= wanted


TYPES: Mapping[str, Factory] = {
    "always-disagg-multimodal-decider": _Always,
    "always-disagg-pd-decider": _Always,
    "multimodal-epd-decider": _MultimodalDecider,
    "prefix-based-pd-decider": _PrefixBasedDecider,
}
