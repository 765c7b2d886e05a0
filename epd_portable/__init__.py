"""Encode, prefill and decode of multimodal models in separate instances, on CUDA, Ascend and CPU."""

from __future__ import annotations

__version__ = "0.1.0"
