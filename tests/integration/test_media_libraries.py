"""The media libraries that are really installed, in a process of their own."""

from __future__ import annotations

import pytest

from tests import warm

CODE = """
from epd_portable.platforms import torchvision_guard
torchvision_guard.install()
import torch
from torchvision.transforms import v2
print(tuple(v2.functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
image = Image.new("RGB", (112, 112), (255, 0, 0))
print(tuple(Qwen2VLImageProcessor()(images=[image], return_tensors="pt")["pixel_values"].shape))
"""


@pytest.mark.needs_vllm
def test_transforms_and_image_processor_work_with_guard() -> None:
    """The guard is for any build of torchvision."""
    result = warm.nursery().run("-c", CODE, timeout=180)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["(3, 4, 4)", "(64, 1176)"]
