"""Description of an item without its media, by vLLM's own table of the bundled model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from epd_portable.demo import MODEL_DIR
from epd_portable.vllm_plugin.requests import ItemMetadata


def make_metadata() -> Any:
    config = ModelConfig(model=str(MODEL_DIR), dtype="float32", max_model_len=256)
    return ItemMetadata(SimpleNamespace(model_config=config))


@pytest.fixture(scope="module")
def metadata() -> Any:
    return make_metadata()


def feature(name: str = "cat", modality: str = "image", **fields: Any) -> Any:
    """An item of the engine with these tensors; positions are computed from those named grid."""
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


def keys(found: Any) -> set[str]:
    """Return the fields of an item without its media; none if it cannot be sent so."""
    return set() if found is None else {*found.data.keys()}


def test_image_without_media_is_its_grid(metadata: Any) -> None:
    item = feature(pixel_values=PIXELS, image_grid_thw=GRID)
    bare = metadata.without_media(item)
    assert keys(bare) == {"image_grid_thw"} and bare.identifier == "cat"
    assert metadata.has_media(item) and not metadata.has_media(bare)
    # Data in another process count as media.
    assert metadata.has_media(feature())


def test_model_is_asked_at_the_start_only(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = make_metadata()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a processor was built for an item")

    monkeypatch.setattr(MULTIMODAL_REGISTRY, "create_processor", refuse)
    image = feature(pixel_values=PIXELS, image_grid_thw=GRID)
    video = feature("clip", "video", pixel_values_videos=PIXELS, video_grid_thw=GRID)
    song = feature("song", "audio", pixel_values=PIXELS)
    found = [keys(metadata.without_media(each)) for each in (image, video, song)]
    assert found == [{"image_grid_thw"}, {"video_grid_thw"}, set()]
    assert all(metadata.has_media(each) for each in (image, video, song))


def test_video_placed_by_undeclared_fields_keeps_its_media(metadata: Any) -> None:
    fields = {"pixel_values_videos": PIXELS, "video_grid_thw": GRID}
    assert keys(metadata.without_media(feature("clip", "video", **fields)))
    timed = feature("timed", "video", second_per_grid_ts=torch.tensor(0.5), **fields)
    assert metadata.without_media(timed) is None


def test_image_without_its_grid_keeps_its_media(metadata: Any) -> None:
    assert metadata.without_media(feature(pixel_values=PIXELS)) is None
