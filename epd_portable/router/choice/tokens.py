"""Tokens: how many an item is taken for, and how many of a prompt each instance most likely has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import ConfigDict

from epd_portable.media.limits import Modality, RequestItem
from epd_portable.router.choice.parameters import Count, Ignored, Parameters
from epd_portable.router.choice.selection_types import Candidates, SelectionRequest

_UNKNOWN_PIXELS: Mapping[Modality, int] = {"video": 20 * 640 * 360, "audio": 139 * 1024}
"""What an item counts for whose pixels are not known; a picture as the configuration says."""


class _Resolution(Parameters):
    width: Count = 640
    height: Count = 360


class _Dynamic(Parameters):
    factor: Count = 1024


class _Static(Parameters):
    staticToken: Count = 1


class _OfPictures(Parameters):
    mode: Literal["dynamic", "static"] = "dynamic"
    defaultResolution: _Resolution = _Resolution()
    dynamic: _Dynamic = _Dynamic()
    static: _Static = _Static()


class _Estimate(Parameters):
    image: _OfPictures = _OfPictures()
    video: Ignored = None
    audio: Ignored = None


class ItemTokens(Parameters):
    """``token-producer``: how many tokens pictures are taken for; all else has no effect here."""

    model_config = ConfigDict(extra="allow")

    estimate: _Estimate = _Estimate()

    def ignored(self) -> list[str]:
        """See `Parameters`."""
        return super().ignored() + [f"estimate.{name}" for name in self.estimate.ignored()]

    def of(self, item: RequestItem) -> int:
        """Return how many tokens an item is taken for; at least one."""
        image = self.estimate.image
        if item.modality == "image" and image.mode == "static":
            return image.static.staticToken
        size = image.defaultResolution
        unknown = _UNKNOWN_PIXELS.get(item.modality, size.width * size.height)
        return max(1, (item.pixels or unknown) // image.dynamic.factor)


def cached_tokens(request: SelectionRequest, candidates: Candidates) -> list[int]:
    """Return how many of the prompt's first tokens each candidate most likely has."""
    blocks, found, matched = request.blocks, [0] * len(candidates), 0
    if blocks:
        having = request.having
        if having is None:
            having = {each.cached for each in candidates if blocks[0] in each.cached.blocks}
        if not having:
            return found
        for index in [i for i, each in enumerate(candidates) if each.cached in having]:
            # Mostly as many as another one has: of a system prompt, say.
            matched = candidates[index].cached.prefix(blocks, matched)
            found[index] = request.up_to(matched)
    return found
