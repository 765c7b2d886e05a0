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

from epd_portable.config.secret import make_secret_file
from epd_portable.vllm_plugin.front_client import FrontSettings, SplitClient
from epd_portable.vllm_plugin.front_engines import EngineSettings

MODEL = Path(__file__).parents[3] / "epd_portable" / "demo" / "model"
CONTROL = {"pd-0": "tcp://127.0.0.1:1", "pd-1": "tcp://127.0.0.1:2"}


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
            role="encode" if name.startswith("e") else "prefill-decode",
            control=CONTROL.get(name, ""),
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


def seen_of(name: str) -> int:
    """Return what the picture of that name shows: each of its pixels."""
    return int.from_bytes(name.encode(), "big")


def feature(name: str, offset: int) -> MultiModalFeatureSpec:
    pixels = torch.full((16, 8), float(seen_of(name)))
    grid = torch.tensor([1, 4, 4])
    data = MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField()),
            "image_grid_thw": MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
        }
    )
    return MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset, 4), name)


def request(name: str, pictures: Iterable[str], **extra: Any) -> EngineCoreRequest:
    """Return a request as vLLM makes it, with a picture of each name."""
    features = [feature(each, 1 + 5 * index) for index, each in enumerate(pictures)]
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(2 + 5 * len(features))),
        mm_features=features or None,
        sampling_params=SamplingParams(max_tokens=4, extra_args=extra or None),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
