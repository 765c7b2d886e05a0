"""Deciders: whether a stage gets an instance of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from epd_portable.router.choice.plugin import BuiltIn, NoParameters, Parameters
from epd_portable.router.choice.situation import Contender, Need
from epd_portable.router.choice.tokens import cached_tokens


class AlwaysDecider(BuiltIn[NoParameters]):
    """``always-disagg-multimodal-decider`` and ``always-disagg-pd-decider``: yes.

    What has no items has nothing to encode, and is not asked about.
    """

    takes = NoParameters

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """See `Decider`."""
        return True


class NeverDecider:
    """What stands in a handler's place for a decider that it does not name: no."""

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """See `Decider`."""
        return False


class Multimodal(Parameters):
    """Of ``multimodal-epd-decider``.

    Attributes:
        enableEncoding: Whether items are encoded apart at all.
        minImageSize: Pictures of fewer pixels than a square with this side are not.
        encoderTimeout: Milliseconds that one encode job may take, in place of
            half of ``transfer.wait_timeout_s``.
    """

    enableEncoding: bool = True
    minImageSize: Annotated[int, Field(ge=0)] = 0
    encoderTimeout: Annotated[int, Field(ge=1)] | None = None


class MultimodalDecider(BuiltIn[Multimodal]):
    """``multimodal-epd-decider``: yes, but for small pictures.

    Attributes:
        encode_timeout_s: See `Multimodal.encoderTimeout`; ``None`` if nothing is said.
    """

    takes = Multimodal

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name, given)
        timeout_ms = self.p.encoderTimeout
        self.encode_timeout_s = timeout_ms / 1000 if timeout_ms else None

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """See `Decider`."""
        item = need.item
        if not self.p.enableEncoding or item is None:
            return False
        is_small = item.modality == "image" and 0 < item.pixels < self.p.minImageSize**2
        return not is_small


class PrefixBased(Parameters):
    """Of ``prefix-based-pd-decider``.

    Attributes:
        nonCachedTokens: Tokens that the decoding instance would have to compute from which on
            others compute them; 0 is never.
        promptTokens: The same of the whole prompt; a shorter one stays, however little is cached.
    """

    nonCachedTokens: Annotated[int, Field(ge=0)] = 0
    promptTokens: Annotated[int, Field(ge=0)] = 0


class PrefixBasedDecider(BuiltIn[PrefixBased]):
    """``prefix-based-pd-decider``: yes for long prompts of which little is cached.

    Attributes:
        wants_blocks: See `Policy`.
    """

    wants_blocks = True
    takes = PrefixBased

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """See `Decider`."""
        wanted = self.p.nonCachedTokens
        if not wanted or need.tokens < self.p.promptTokens:
            return False
        cached = cached_tokens(need, [decode])[0] if decode is not None else 0
        return need.tokens - cached >= wanted
