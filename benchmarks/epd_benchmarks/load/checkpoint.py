"""A checkpoint with random weights for measurements, made once and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from epd_benchmarks import console
from epd_portable.config.folders import cache_folder
from epd_portable.errors import MeasurementError
from epd_portable.launch.environment import child_environ

MODEL = "shape"
NAME = "shape-12x384-6x512"
"""A vision tower of 12 layers of width 384, a language model of 6 of width 512."""
_SHAPE = "--vision-layers 12 --vision-size 384 --text-layers 6 --text-size 512 --max-pixels 200704"
"""Larger pictures are scaled down to 448 × 448, which are 256 tokens."""


def cached_checkpoint() -> Path:
    """Return the folder of the checkpoint, which is made if it is not there.

    Raises:
        MeasurementError: It cannot be made.
    """
    folder = cache_folder(os.environ) / "shapes" / NAME
    if folder.is_dir():
        return folder
    console.progress(f"making {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In one piece or not at all: another measurement may want it at the same time.
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name, NAME)
        # A process of its own: neither torch nor a model's library is loaded into the measuring.
        argv = [sys.executable, "-m", "epd_portable.demo.shape", str(made), *_SHAPE.split()]
        ended = subprocess.run(argv, env=child_environ(os.environ), capture_output=True, text=True)
        if ended.returncode:
            tail = "\n".join(ended.stderr.splitlines()[-15:])
            raise MeasurementError(f"{folder} could not be made:\n{tail}")
        if not folder.is_dir():
            shutil.move(made, folder)
    return folder
