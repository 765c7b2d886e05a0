"""Stage times whose sums can be done in one's head."""

from __future__ import annotations

from typing import Any

from epd_portable.bench.sizing.stages import StageTimes

PICTURE = 448
"""Side of a picture of 256 embeddings."""


LIGHT = {
    "prefill": {"base_s": 0.01, "per_token_s": 1e-5},
    "decode": {"base_s": 0.01, "per_sequence_s": 0.001},
}
"""A language model that takes little beside the vision tower."""


def stage_times(**changes: Any) -> StageTimes:
    """Return times without front end and transfer, unless they are given.

    A picture of 256 embeddings is encoded in 0.5 s, 1000 tokens are prefilled in 1.1 s, a step of
    one sequence takes 0.02 s and of two 0.03 s.
    """
    return StageTimes.model_validate(
        {
            "source": "made up for tests",
            "encode": {"base_s": 0.244, "per_embedding_s": 0.001},
            "prefill": {"base_s": 0.1, "per_token_s": 0.001},
            "decode": {"base_s": 0.01, "per_sequence_s": 0.01},
            "transfer": {"base_s": 0.0, "byte_s": 0.0},
            **changes,
        }
    )
