"""The checkpoints that the end-to-end tests serve."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import NAMES

pytestmark = [pytest.mark.needs_vllm, pytest.mark.full]

BUILD_TWICE = """
import sys
from pathlib import Path
from epd_portable.platforms import torchvision_guard
torchvision_guard.install()
from tests import checkpoints
*folders, names = sys.argv[1:]
for name in names.split(","):
    for folder in folders:
        checkpoints.build(name, Path(folder) / name)
"""


def test_every_checkpoint_is_the_same_at_every_build(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    subprocess.run(
        [sys.executable, "-c", BUILD_TWICE, str(one), str(other), ",".join(NAMES)],
        check=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    for name in NAMES:
        files = sorted(path.name for path in (one / name).iterdir())
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
        assert filecmp.cmpfiles(one / name, other / name, files, shallow=False)[1:] == ([], [])
        assert sum((one / name / file).stat().st_size for file in files) < 4_000_000
