"""A front's client over engines that tests play, and requests to it as vLLM makes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from epd_portable.config.roles import Role
from epd_portable.config.secret import make_secret_file
from epd_portable.front.client import FrontSettings, SplitClient
from epd_portable.front.engines import EngineSettings

MODEL = Path(__file__).parents[3] / "epd_portable" / "demo" / "model"
CONTROL = {"pd-0": "tcp://127.0.0.1:1", "pd-1": "tcp://127.0.0.1:2"}
ROLES: dict[str, Role] = {"e": "encode", "p": "prefill-decode", "a": "encode-prefill-decode"}
"""By the first letter of a name."""


def config_of_front() -> Any:
    """Return vLLM's configuration of a front of the bundled model."""
    return AsyncEngineArgs(model=str(MODEL), enforce_eager=True).create_engine_config()


def client_of(
    config: Any,
    folder: Path,
    *names: str,
    max_queued_items: int = 2,
    index: int = 0,
    **settings: Any,
) -> SplitClient:
    """Return a front's client of engines that are not up; their names begin with their role."""
    secret = folder / "secret"
    if not secret.exists():
        make_secret_file(str(secret))
    engines = [
        EngineSettings(
            name=name,
            role=ROLES[name[0]],
            control=CONTROL.get(name, "" if name[0] == "e" else f"tcp://{name}"),
            max_queued_items=max_queued_items,
        )
        for name in names
    ]
    fixed = {
        "sockets": [str(folder / "front")],
        "secret_file": str(secret),
        "elastic_encode": False,
    }
    return SplitClient(config, FrontSettings(engines=engines, **(fixed | settings)), index)


PAIRS = {"A": 1, "B": 2, "C": 5}
"""Videos, and how many pairs of frames they have."""
_EMBEDS = 4
"""Of a picture, and of a pair of frames."""


def seen_of(name: str) -> list[int]:
    """Return what the picture of that name shows, or each pair of frames of a video or its part."""
    video, _, part = name.partition("#")
    shown = int.from_bytes(video.encode(), "big")
    if video not in PAIRS:
        return [shown]
    begin, _, end = part.partition("-")
    return [1000 * shown + pair for pair in range(int(begin or 0), int(end or PAIRS[video]))]


def content_of(feature: MultiModalFeatureSpec) -> list[int] | None:
    """Return what an item shows, by its pixels; ``None`` without them."""
    assert feature.data is not None
    found = [each.data for key, each in feature.data.items() if key.startswith("pixel_values")]
    return found[0][:: 4 * _EMBEDS, 0].int().tolist() if found else None


def feature(name: str, offset: int) -> MultiModalFeatureSpec:
    """Return an item; text stands around each pair of frames of ``C``."""
    shown = torch.tensor(seen_of(name), dtype=torch.float32)
    pixels = shown.repeat_interleave(4 * _EMBEDS)[:, None].expand(-1, 8)
    kind, pixels_of = ("video", "_videos") if name in PAIRS else ("image", "")
    grid = torch.tensor([len(shown), 4, 4])
    data = MultiModalKwargsItem(
        {
            f"pixel_values{pixels_of}": MultiModalFieldElem(pixels, MultiModalBatchedField()),
            f"{kind}_grid_thw": MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
        }
    )
    around = [False] * (name == "C")
    mask = torch.tensor([*around, *[True] * _EMBEDS, *around] * len(shown))
    place = PlaceholderRange(offset, len(mask), mask if around else None)
    return MultiModalFeatureSpec(data, kind, name, place, name)


def request(name: str, pictures: Iterable[str], **extra: Any) -> EngineCoreRequest:
    """Return a request as vLLM makes it, with a picture, or a video, of each name."""
    features, end = [], 0
    for each in pictures:
        features.append(feature(each, end + 1))
        end += 1 + features[-1].mm_position.length
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(end + 2)),
        mm_features=features or None,
        sampling_params=SamplingParams(max_tokens=4, extra_args=extra or None),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
