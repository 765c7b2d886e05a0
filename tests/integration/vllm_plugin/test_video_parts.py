"""Parts of a video are, put together, the video: what it is, where it is, and its positions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem

from epd_portable.vllm_plugin.video_parts import (
    DIVISIBLE,
    VideoParts,
    place_by_whole_videos,
    whole_videos,
)
from tests.integration.front.played_front import config_of_front, request


@pytest.fixture(scope="module")
def config() -> Any:
    return config_of_front()


@pytest.mark.parametrize("encoders", [2, 3, 9])
def test_parts_together_are_the_video(config: Any, encoders: int) -> None:
    asked = request("r", "aBCCA")
    divided = VideoParts(config, encoders).divide(asked)
    assert len(divided.mm_features) == 2 + 2 + 2 * min(encoders, 5)
    for before, after in pairwise(divided.mm_features):
        assert before.mm_position.offset + before.mm_position.length <= after.mm_position.offset
    whole = whole_videos(divided.mm_features)
    assert [each.mm_position for each in whole] == [each.mm_position for each in asked.mm_features]
    assert [grid(each) for each in whole] == [grid(each) for each in asked.mm_features]
    for one in asked.mm_features[1:3]:
        parts = [e for e in divided.mm_features if e.identifier.startswith(f"{one.identifier}#")]
        pixels = torch.cat([each.data["pixel_values_videos"].data for each in parts])
        known = one.data["pixel_values_videos"].data
        assert torch.equal(pixels[: len(known)], known)


@pytest.mark.parametrize(
    "model", [Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration]
)
def test_positions_are_those_of_the_whole_video(config: Any, model: Any) -> None:
    asked = request("r", "aBA")
    for each in asked.mm_features[1:]:
        seconds = MultiModalFieldElem(torch.tensor(2.0), MultiModalBatchedField(keep_on_cpu=True))
        each.data["second_per_grid_ts"] = seconds
    divided = VideoParts(config, 2).divide(asked)
    played: Any = SimpleNamespace(config=config.model_config.hf_config)
    played.iter_mm_grid_thw = partial(model.iter_mm_grid_thw, played)
    played.get_mrope_input_positions = partial(model.get_mrope_input_positions, played)
    wanted, delta = played.get_mrope_input_positions(asked.prompt_token_ids, asked.mm_features)
    apart, _ = played.get_mrope_input_positions(asked.prompt_token_ids, divided.mm_features)
    place_by_whole_videos(played)
    found, found_delta = played.get_mrope_input_positions(
        divided.prompt_token_ids, divided.mm_features
    )
    assert not torch.equal(apart, wanted), "otherwise the comparison would prove nothing"
    assert torch.equal(found, wanted) and found_delta == delta


def test_a_mask_may_be_all_of_a_video(config: Any) -> None:
    (one,) = (asked := request("r", "B")).mm_features
    one.mm_position = replace(one.mm_position, is_embed=torch.ones(8, dtype=torch.bool))
    parts = [each.mm_position for each in VideoParts(config, 2).divide(asked).mm_features]
    assert [(each.offset, each.get_num_embeds()) for each in parts] == [(1, 4), (5, 4)]


def test_client_names_are_no_consecutive_parts(config: Any) -> None:
    features = request("r", "aab").mm_features
    names = ["x#0-2", "x#3-5", "x#0-3"]
    named = [replace(each, identifier=name) for each, name in zip(features, names, strict=True)]
    assert whole_videos(named) == named


def test_videos_of_which_not_all_is_known_are_whole(config: Any) -> None:
    asked = request("r", "B")
    asked.mm_features[0].data["more"] = asked.mm_features[0].data["video_grid_thw"]
    assert VideoParts(config, 2).divide(asked) is asked


def test_other_models_are_named_in_the_log(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = SimpleNamespace(
        multimodal_config=object(), architectures=["Other"], architecture="Other"
    )
    parts = VideoParts(SimpleNamespace(model_config=model), 2)
    asked = request("r", "B")
    assert parts.divide(asked) is asked
    assert "frames of Other are not known to be encoded independently" in caplog.text


def test_models_with_video_parts_are_compared_with_one_process() -> None:
    """By `tests/e2e/front/test_modalities.py`; the last takes tower and positions of another."""
    assert {each for each in DIVISIBLE if "Moe" not in each} == {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    }
    same = ("embed_multimodal", "_process_video_input", "get_mrope_input_positions")
    for name in same:
        moe = getattr(Qwen3VLMoeForConditionalGeneration, name)
        assert moe is getattr(Qwen3VLForConditionalGeneration, name)


def grid(feature: Any) -> list[int]:
    (found,) = (each.data for key, each in feature.data.items() if key.endswith("grid_thw"))
    return found.tolist()
