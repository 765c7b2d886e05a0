"""A checkpoint with random weights for measurements, made once and kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.safe_path import safe_environ

MODEL = "shape"
DEFAULT_SHAPE = "vision=12x384,language=6x512"
MAX_PIXELS = 200_704
"""Larger pictures are scaled down to this: 448 × 448, which are 256 tokens."""

_TAIL_LINES = 15
_SHAPE = re.compile(r"vision=(\d+)x(\d+),language=(\d+)x(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How large the model is; layers and widths.

    Attributes:
        vision_layers: Of the vision tower.
        vision_size: Its width.
        text_layers: Of the language model.
        text_size: Its width.
    """

    vision_layers: int
    vision_size: int
    text_layers: int
    text_size: int

    @property
    def folder_name(self) -> str:
        """Name of its folder; served under it, too."""
        return f"shape-{self.vision_layers}x{self.vision_size}-{self.text_layers}x{self.text_size}"


def read_shape(text: str) -> Shape:
    """Read ``vision=LAYERSxWIDTH,language=LAYERSxWIDTH``.

    Raises:
        ConfigError: It is not of this form, or the widths cannot be divided into heads.
    """
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--shape {text}: expected {DEFAULT_SHAPE}")
    vision_layers, vision_size, text_layers, text_size = map(int, found.groups())
    if min(vision_layers, vision_size, text_layers, text_size) < 1:
        raise ConfigError(f"--shape {text}: every number must be positive")
    if vision_size % 64 or text_size % 128:
        raise ConfigError(
            f"--shape {text}: the width of vision must be a multiple of 64, that of language a "
            "multiple of 128"
        )
    return Shape(
        vision_layers=vision_layers,
        vision_size=vision_size,
        text_layers=text_layers,
        text_size=text_size,
    )


def cached_checkpoint(shape: Shape, report: Callable[[str], None]) -> Path:
    """Return the folder of a checkpoint, which is made if it is not there.

    Raises:
        MeasurementError: It cannot be made.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "epd-portable")
    folder = cache / "shapes" / shape.folder_name
    if folder.is_dir():
        return folder
    report(f"making {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In one piece or not at all: another measurement may want it at the same time.
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name, folder.name)
        _make(shape, made)
        if not folder.is_dir():
            shutil.move(made, folder)
    return folder


def _make(shape: Shape, folder: Path) -> None:
    # A process of its own: neither torch nor a model's library is loaded into the measuring.
    argv = [sys.executable, "-m", "epd_portable.demo.shape", str(folder)]
    argv += ["--vision-layers", str(shape.vision_layers), "--vision-size", str(shape.vision_size)]
    argv += ["--text-layers", str(shape.text_layers), "--text-size", str(shape.text_size)]
    argv += ["--max-pixels", str(MAX_PIXELS)]
    ended = subprocess.run(argv, env=safe_environ(os.environ), capture_output=True, text=True)
    if ended.returncode:
        tail = "\n".join(ended.stderr.splitlines()[-_TAIL_LINES:])
        raise MeasurementError(f"{folder} could not be made:\n{tail}")
