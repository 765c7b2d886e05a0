"""Imported after vLLM where engines are forked from: what each would import for its first item.

transformers looks for the class of a processor in every module that has one of its kind.
"""

from __future__ import annotations

from transformers import AutoProcessor

from epd_portable.demo import MODEL_DIR

AutoProcessor.from_pretrained(MODEL_DIR)
