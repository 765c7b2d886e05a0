"""Deciders: whether a stage gets an instance of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from epd_portable.router.choice.plugin import NoParameters, Parameters, read_parameters
from epd_portable.router.choice.scorers import BYTES_A_TOKEN
from epd_portable.router.choice.situation import Contender, Need


class AlwaysDecider:
    """``always-disagg-multimodal-decider`` and ``always-disagg-pd-decider``: yes.

    What has no items has nothing to encode, and is not asked about.
    """

    def __init__(self, name: str = "", given: Mapping[str, Any] | None = None) -> None:
        read_parameters(NoParameters, name, given or {})

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
            ``router.encode_timeout_s``.
    """

    enableEncoding: bool = True
    minImageSize: Annotated[int, Field(ge=0)] = 0
    encoderTimeout: Annotated[int, Field(ge=1)] | None = None


class MultimodalDecider:
    """``multimodal-epd-decider``: yes, but for small pictures.

    Attributes:
        encode_timeout_s: See `Multimodal.encoderTimeout`; ``None`` if nothing is said.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        p = read_parameters(Multimodal, name, given)
        self._enabled = p.enableEncoding
        self._pixels = p.minImageSize**2
        self.encode_timeout_s = p.encoderTimeout / 1000 if p.encoderTimeout else None

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """See `Decider`."""
        item = need.item
        if not self._enabled or item is None:
            return False
        is_small = item.modality == "image" and 0 < item.pixels < self._pixels
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


class PrefixBasedDecider:
    """``prefix-based-pd-decider``: yes for long prompts of which little is cached.

    Tokens are guessed from the text, 4 bytes each; items of the request do not count.

    Attributes:
        wants_blocks: See `Policy`.
    """

    wants_blocks = True

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self._p = read_parameters(PrefixBased, name, given)

    def apart(self, need: Need, decode: Contender | None) -> bool:
        """See `Decider`."""
        wanted = self._p.nonCachedTokens
        if not wanted or need.nbytes < self._p.promptTokens * BYTES_A_TOKEN:
            return False
        cached = decode.holdings.prefix(need.blocks) if decode is not None else 0
        left = need.nbytes - cached * need.block_bytes
        return left >= wanted * BYTES_A_TOKEN
