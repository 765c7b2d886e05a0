"""What is said of an item without its media, by vLLM's own table of the bundled model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_portable.demo import MODEL_DIR

pytestmark = pytest.mark.needs_vllm


def make_metadata() -> Any:
    from vllm.config import ModelConfig

    from epd_portable.vllm_plugin.metadata import ItemMetadata

    config = ModelConfig(model=str(MODEL_DIR), dtype="float32", max_model_len=256)
    return ItemMetadata(SimpleNamespace(model_config=config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def metadata() -> Any:
    return make_metadata()


def feature(name: str = "cat", modality: str = "image", **fields: Any) -> Any:
    """An item of the engine with these tensors; positions are computed from those named grid."""
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldConfig,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    data = None
    if fields:
        elements = {
            key: MultiModalFieldConfig.batched(
                modality, keep_on_cpu=not key.startswith("pixel")
            ).build_elems(key, value[None])[0]
            for key, value in fields.items()
        }
        data = MultiModalKwargsItem(elements)
    return MultiModalFeatureSpec(
        data=data,
        modality=modality,
        identifier=name,
        mm_position=PlaceholderRange(offset=0, length=4),
    )


GRID = torch.tensor([1, 4, 4])
PIXELS = torch.zeros(16, 8)


def test_a_picture_is_described_by_its_grid_which_alone_is_none(metadata: Any) -> None:
    item = feature(pixel_values=PIXELS, image_grid_thw=GRID)
    assert metadata.of(item) == {"image_grid_thw": [1, 4, 4]}
    assert metadata.has_media(item)
    assert not metadata.has_media(feature(image_grid_thw=GRID))
    # What lies in another process counts.
    assert metadata.has_media(feature())


def test_an_item_without_data_is_described_as_it_was_before(metadata: Any) -> None:
    assert metadata.of(feature("dog")) is None
    metadata.of(feature("dog", pixel_values=PIXELS, image_grid_thw=GRID))
    assert metadata.of(feature("dog")) == {"image_grid_thw": [1, 4, 4]}


def test_no_more_items_are_remembered_than_allowed(
    metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from epd_portable.vllm_plugin import metadata as module

    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    for name in ("emu", "fox", "gnu"):
        metadata.of(feature(name, pixel_values=PIXELS, image_grid_thw=GRID))
    assert metadata.of(feature("emu")) is None
    assert metadata.of(feature("gnu")) == {"image_grid_thw": [1, 4, 4]}


def test_the_model_is_asked_at_the_start_and_never_while_items_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    metadata = make_metadata()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a processor was built for an item")

    monkeypatch.setattr(MULTIMODAL_REGISTRY, "create_processor", refuse)
    picture = feature(pixel_values=PIXELS, image_grid_thw=GRID)
    video = feature("clip", "video", pixel_values_videos=PIXELS, video_grid_thw=GRID)
    song = feature("song", "audio", pixel_values=PIXELS)
    described = [metadata.of(each) for each in (picture, video, song)]
    assert described == [{"image_grid_thw": [1, 4, 4]}, {"video_grid_thw": [1, 4, 4]}, {}]
    assert all(metadata.has_media(each) for each in (picture, video, song))


def test_a_video_placed_by_more_than_what_is_declared_cannot_be_described(metadata: Any) -> None:
    plain = {"pixel_values_videos": PIXELS, "video_grid_thw": GRID}
    assert metadata.of(feature("clip", "video", **plain)) == {"video_grid_thw": [1, 4, 4]}
    timed = feature("timed", "video", second_per_grid_ts=torch.tensor(0.5), **plain)
    assert metadata.of(timed) == {}


def test_a_modality_that_the_model_does_not_declare_cannot_be_described(metadata: Any) -> None:
    assert metadata.of(feature("song", "audio", pixel_values=PIXELS)) == {}
