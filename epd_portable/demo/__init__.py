"""The bundled demo model: a tiny Qwen2.5-VL for questions about drawn images."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Folder of the trained checkpoint; it loads without network access."""

__all__ = ["MODEL_DIR"]
