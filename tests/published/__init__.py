"""Configuration files as a hub publishes them, without the defaults that a library adds."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("qwen2_5_vl", "qwen3_vl")
