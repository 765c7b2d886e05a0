"""Encode, prefill and decode in separate instances of vLLM, on CUDA, Ascend and CPU alike."""

from __future__ import annotations

__version__ = "0.1.0"
