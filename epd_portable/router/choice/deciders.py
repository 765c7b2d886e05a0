"""Built-in deciders: whether a stage gets an instance of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from epd_portable.router.choice.parameters import Count, CountOrZero, Parameters
from epd_portable.router.choice.selection_types import Candidate, SelectionRequest
from epd_portable.router.choice.tokens import cached_tokens


class _Always(Parameters):
    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        return True


class MultimodalDecider(Parameters):
    """``multimodal-epd-decider``: pictures of fewer pixels than a square of a side stay.

    Attributes:
        enableEncoding: Whether items are encoded apart at all.
        minImageSize: The side.
        encoderTimeout: Milliseconds that one encode job may take, in place of
            half of ``transfer.wait_timeout_s``.
    """

    enableEncoding: bool = True
    minImageSize: CountOrZero = 0
    encoderTimeout: Count | None = None

    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        """See `Decider`."""
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

    def disaggregate(self, request: SelectionRequest, decode: Candidate | None) -> bool:
        if not self.nonCachedTokens or request.tokens < self.promptTokens:
            return False
        cached = sum(cached_tokens(request, [] if decode is None else [decode]))
        return request.tokens - cached >= self.nonCachedTokens


TYPES: Mapping[str, type[Parameters]] = {
    "always-disagg-multimodal-decider": _Always,
    "always-disagg-pd-decider": _Always,
    "multimodal-epd-decider": MultimodalDecider,
    "prefix-based-pd-decider": _PrefixBasedDecider,
}
