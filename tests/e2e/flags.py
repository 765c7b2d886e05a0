"""Names of the files by which tests steer the workers of `workers.py` while they run."""

from __future__ import annotations

SLOW = "encoder_delay_s"
"""Holds the seconds that the encoder takes longer for each step."""
SPOIL = "spoil_items"
"""While it exists, the columns of items that arrive are shifted by one."""
