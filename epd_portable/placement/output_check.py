"""Comparison of encoder outputs of the same item by different engines. Pure.

Platforms and releases compute the same output with other rounding. `BOUNDS` lie above that, and
below the difference of a fault: other weights, a wrong kernel, another layout.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from epd_portable.wire.params import OutputSample

BOUNDS: Mapping[str, float] = {"float32": 0.025, "float16": 0.025, "bfloat16": 0.2}
"""Largest relative difference of two engines, by dtype of the output.

Five times the expected distance of an encoder of 32 layers from exact arithmetic. In float32,
devices may multiply with the mantissa of float16 (TF32). Measurements: record 95."""
MOST = 1e6
"""Largest relative difference that is reported; of values that are not finite, too."""


class Comparison(NamedTuple):
    """Encoder output of one engine next to the right one.

    Attributes:
        difference: Relative, at most `MOST`.
        problem: Figure and bound, where the output must not be used; or empty.
    """

    difference: float
    problem: str


def compare(
    own: OutputSample | None, encoders: Mapping[str, OutputSample]
) -> dict[str, Comparison]:
    """Return a comparison for each encode engine from which an engine gets items.

    Args:
        own: Output of the engine that takes items; ``None`` if it cannot encode.
        encoders: Outputs of the same item by encode engines, in the order of their joining. Without
            ``own``, the first of those that most others agree with is right.
    """
    by, right = "its own encoder", own
    if right is None:
        agreeing = {
            name: sum(not _compare(one, other).problem for other in encoders.values())
            for name, one in encoders.items()
        }
        if len(agreeing) < 2:
            return {}
        by = max(agreeing, key=lambda each: agreeing[each])
        right = encoders[by]
    found = {name: _compare(right, each) for name, each in encoders.items()}
    return {
        name: Comparison(apart, f"{problem} from {by}" if problem else "")
        for name, (apart, problem) in found.items()
    }


def difference(right: OutputSample, other: OutputSample) -> float:
    """Return the relative difference of two outputs; `MOST` for values that are not finite.

    It is the Euclidean distance of the values divided by the norm of the first, or the relative
    difference of the norms of the whole outputs where that is larger.
    """
    (norm, *values), (other_norm, *others) = _numbers(right), _numbers(other)
    if len(values) != len(others):
        return MOST
    apart = math.dist(values, others) / (math.hypot(*values) or 1.0)
    found = max(apart, abs(norm - other_norm) / (norm or 1.0))
    return min(found, MOST) if math.isfinite(found) else MOST


def _compare(right: OutputSample, other: OutputSample) -> Comparison:
    if (right.shape, right.dtype) != (other.shape, other.dtype):
        form = f"{other.dtype} {other.shape}, not {right.dtype} {right.shape},"
        return Comparison(MOST, f"encoder outputs are {form}")
    bound, found = BOUNDS.get(right.dtype, min(BOUNDS.values())), difference(right, other)
    if found <= bound:
        return Comparison(found, "")
    form = f"{found:.2g} (bound {bound:g} for {right.dtype})"
    return Comparison(found, f"encoder outputs differ by {form}")


def _numbers(sample: OutputSample) -> Sequence[float]:
    found = array("f", sample.numbers)
    return found if len(found) else (0.0,)
