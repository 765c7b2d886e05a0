"""Limits of the pair's space."""

from __future__ import annotations

import json

from epd_portable.demo import MODEL_DIR

ITEM_BYTES = (
    16 * json.loads((MODEL_DIR / "config.json").read_text())["vision_config"]["out_hidden_size"] * 4
)
"""Bytes of an image of 112 x 112 pixels in float32: 16 tokens."""
POOL_ITEMS = 4
QUEUE = 64
STEP = 512
"""Embeddings that a step of the encode instance computes."""
SEATS = 32
"""Requests that the PD instance runs at once."""
