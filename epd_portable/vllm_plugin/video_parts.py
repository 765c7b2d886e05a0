"""Videos of which several encode engines encode a part each.

Encoders of some families attend within a pair of frames, so a video's rows are those of its parts.
The front divides such a video before it chooses encoders (`VideoParts`). A part is an item
like any other, with a name, a place in the prompt and a transfer of its own. It fails, comes again
and leaves caches on its own, and a prompt is computed as far as its parts are there. Only positions
in time, height and width are of the whole video: the workers of engines that generate put it
together for that (`place_by_whole_videos`).
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger(__name__)

DIVISIBLE = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Architectures whose videos may be divided between any two pairs of frames."""

_NAME = re.compile(r"(?P<video>.+)#(?P<begin>\d+)-(?P<end>\d+)", re.DOTALL)
_PIXELS, _GRID = "pixel_values_videos", "video_grid_thw"
_OF_THE_WHOLE = {"second_per_grid_ts", "timestamps"}
"""Fields that parts have as their video has them: its positions depend on them."""


class VideoParts:
    """Divides videos for one front; logs whether it does, and why not.

    Args:
        encoders: Encode engines of the plan, up or not: a video that comes again is divided as
            before, so caches have its parts.

    Attributes:
        most: Into how many parts; 1 if no video is divided.
    """

    def __init__(self, config: VllmConfig, encoders: int) -> None:
        self.most = 1
        model = config.model_config
        if encoders < 2 or model.multimodal_config is None:
            return
        if DIVISIBLE.intersection(model.architectures):
            logger.info("videos are encoded in up to %d parts", encoders)
            self.most = encoders
        else:
            logger.info(
                "each video is encoded by one encode engine: frames of %s are not known to be "
                "encoded independently",
                model.architecture,
            )

    def divide(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return a request in which videos are divided that can be."""
        features = [part for each in request.mm_features or () for part in self._parts(each)]
        if len(features) == len(request.mm_features or ()):
            return request
        divided = copy.copy(request)
        divided.mm_features = features
        return divided

    def _parts(self, feature: MultiModalFeatureSpec) -> list[MultiModalFeatureSpec]:
        data = feature.data
        if feature.modality != "video" or data is None:
            return [feature]
        if not {_PIXELS, _GRID} <= set(data) <= {_PIXELS, _GRID} | _OF_THE_WHOLE:
            return [feature]
        pixels, (pairs, *size) = data[_PIXELS].data, data[_GRID].data.tolist()
        count = min(pairs, self.most)
        if count < 2:
            return [feature]
        rows, tokens = len(pixels) // pairs, _ends(feature.mm_position, pairs)
        parts = []
        for begin, end in pairwise(pairs * number // count for number in range(count + 1)):
            some = replace(data[_PIXELS], data=pixels[begin * rows : end * rows])
            grid = replace(data[_GRID], data=torch.tensor([end - begin, *size]))
            name = f"{feature.identifier}#{begin}-{end}"
            part = replace(
                feature,
                data=type(data)({**data, _PIXELS: some, _GRID: grid}),
                identifier=name,
                mm_position=_between(feature.mm_position, tokens[begin], tokens[end]),
                mm_hash=name,
            )
            parts.append(part)
        return parts


def is_part(identifier: str) -> bool:
    """Return whether a video's identifier is that of a part."""
    return _NAME.fullmatch(identifier) is not None


def place_by_whole_videos(model: Any) -> None:
    """Let a model compute the positions of prompts as if no video were divided."""
    compute = getattr(model, "get_mrope_input_positions", None)
    if compute is not None:
        model.get_mrope_input_positions = lambda input_tokens, mm_features: compute(
            input_tokens, whole_videos(mm_features)
        )


def whole_videos(features: Iterable[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
    """Return items without parts: in their place are the places and sizes of their videos."""
    found: list[MultiModalFeatureSpec] = []
    follows: tuple[str, str] | None = None
    for each in sorted(features, key=lambda each: each.mm_position.offset):
        name = _NAME.fullmatch(each.identifier)
        if name is not None and (name["video"], name["begin"]) == follows:
            found[-1] = _joined(found[-1], each)
        else:
            found.append(each)
        follows = None if name is None else (name["video"], name["end"])
    return found


def _ends(place: PlaceholderRange, pairs: int) -> list[int]:
    """Return after how many tokens of a video's place each pair of its frames ends, from 0 on.

    Where text stands between them, the token that closes a pair belongs to it: vLLM looks for it.
    """
    if place.is_embed is None:
        return [place.length * number // pairs for number in range(pairs + 1)]
    embeds: Sequence[int] = place.is_embed.nonzero().flatten().tolist()
    first = [len(embeds) * number // pairs for number in range(1, pairs)]
    return [0, *(min(embeds[each - 1] + 2, embeds[each]) for each in first), place.length]


def _between(place: PlaceholderRange, begin: int, end: int) -> PlaceholderRange:
    embeds = None if place.is_embed is None else place.is_embed[begin:end]
    return PlaceholderRange(place.offset + begin, end - begin, embeds)


def _joined(before: MultiModalFeatureSpec, part: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    """Return what comes of the first parts of a video and the next."""
    assert before.data is not None and part.data is not None
    grid = before.data[_GRID].data.clone()
    grid[0] += part.data[_GRID].data[0]
    first, second = before.mm_position, part.mm_position
    embeds = None
    if first.is_embed is not None and second.is_embed is not None:
        embeds = torch.cat([first.is_embed, second.is_embed])
    place = PlaceholderRange(first.offset, first.length + second.length, embeds)
    data = type(before.data)({**before.data, _GRID: replace(before.data[_GRID], data=grid)})
    return replace(before, data=data, mm_position=place)
