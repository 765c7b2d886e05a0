"""Names of the files by which tests steer the workers of `workers.py` while they run."""

from __future__ import annotations

SLOW = "encoder_delay_s"
"""Holds the seconds that the encoder takes longer for each step."""
SPOIL = "spoil_items"
"""While it exists, the columns of items that arrive are shifted by one."""
SLOW_MODULES = "module_delay_s"
"""Holds the seconds that each module of a prefill+decode instance's encoder takes longer."""
SLOW_STEPS = "step_delay_s"
"""Holds the seconds that each step with tokens takes longer."""
OTHER_WEIGHTS = "other_weights"
"""While it exists, encode workers that start change the weights of their encoder."""
NO_MEMORY = "no_memory"
"""While it exists, encoders find no memory; the first one removes it, if it is empty."""
HOLD = "hold_encoders"
"""While it exists, no encoder ends a step that it has begun; with a name in it, only that one's."""
