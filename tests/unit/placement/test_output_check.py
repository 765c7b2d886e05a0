"""Comparison of encoder outputs: figures, bounds, and the output that is right."""

from __future__ import annotations

import math
from array import array

import pytest

from epd_portable.placement.output_check import BOUNDS, MOST, compare, difference
from epd_portable.wire.params import OutputSample

VALUES = [1.0, -2.0, 3.0, -4.0]


def refused(own: OutputSample | None, encoders: dict[str, OutputSample]) -> dict[str, str]:
    """Return the problem of each encoder that has one."""
    found = compare(own, encoders)
    return {name: each.problem for name, each in found.items() if each.problem}


def sample(
    scale: float = 1.0, *, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 2), norm: float = 0
) -> OutputSample:
    """Return the sample of an output whose values are scaled."""
    values = [scale * each for each in VALUES]
    numbers = array("f", [norm or math.hypot(*values), *values])
    return OutputSample(shape=shape, dtype=dtype, numbers=numbers.tobytes())


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        (sample(), 0.0),
        (sample(1.5), 0.5),
        (sample(-1.0), 2.0),
        (sample(norm=2 * math.hypot(*VALUES)), 1.0),
        (sample(math.nan), MOST),
        (sample(math.inf), MOST),
        (OutputSample(shape=(2, 2), dtype="bfloat16", numbers=b""), MOST),
    ],
)
def test_difference_is_relative_to_the_right_output(other: OutputSample, apart: float) -> None:
    assert difference(sample(), other) == pytest.approx(apart)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
def test_difference_is_bounded_by_dtype(dtype: str, bound: float) -> None:
    own = sample(dtype=dtype)
    within, beyond = (sample(1 + part * bound, dtype=dtype) for part in (0.99, 1.01))
    (found,) = refused(own, {"near": within, "far": beyond}).items()
    assert found == (
        "far",
        f"encoder outputs differ by {1.01 * bound:.2g} (bound {bound:g} for {dtype}) "
        "from its own encoder",
    )


def test_outputs_of_zeros_are_equal() -> None:
    assert refused(sample(0.0), {"e": sample(0.0)}) == {}


@pytest.mark.parametrize("other", [sample(dtype="float16"), sample(shape=(4, 1))])
def test_other_shape_or_dtype_is_refused(other: OutputSample) -> None:
    (problem,) = refused(sample(), {"e": other}).values()
    assert problem.startswith("encoder outputs are ") and "not bfloat16 (2, 2)" in problem


@pytest.mark.parametrize(
    ("scales", "names"),
    [
        ([1, 1, 2], {"e2"}),
        ([2, 1, 1], {"e0"}),
        ([1, 2], {"e1"}),  # Of two that differ, the one that joined first is right.
        ([1], set()),
        ([], set()),
    ],
)
def test_most_encoders_are_right_without_an_own_one(scales: list[float], names: set[str]) -> None:
    encoders = {f"e{number}": sample(scale) for number, scale in enumerate(scales)}
    assert refused(None, encoders).keys() == names
