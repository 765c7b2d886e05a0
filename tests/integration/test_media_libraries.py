"""The media libraries that are really installed, in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from tests import warm

INSTALL = "from epd_portable.platforms import torchvision_guard; torchvision_guard.install(); "


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_transforms_work_with_the_guard_for_any_build() -> None:
    code = (
        "import torch; from torchvision.transforms import v2;"
        "print(tuple(v2.functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))"
    )
    assert last_line(warm.nursery().run("-c", INSTALL + code, timeout=180)) == "(3, 4, 4)"


@pytest.mark.needs_vllm
def test_image_processor_of_transformers_works_with_guard() -> None:
    code = (
        "from PIL import Image;"
        "from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor;"
        "picture = Image.new('RGB', (112, 112), (255, 0, 0));"
        "out = Qwen2VLImageProcessor()(images=[picture], return_tensors='pt');"
        "print(tuple(out['pixel_values'].shape))"
    )
    assert last_line(warm.nursery().run("-c", INSTALL + code, timeout=180)) == "(64, 1176)"
