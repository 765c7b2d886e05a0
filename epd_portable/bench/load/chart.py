"""The chart of `load`, by matplotlib, which only this module needs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epd_portable.errors import MeasurementError


def import_pyplot() -> Any:
    """Return ``matplotlib.pyplot``, without a display.

    Raises:
        MeasurementError: It is missing; says how to get it.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MeasurementError(
            f"--png needs matplotlib ({error}): pip install 'epd-portable[bench]', "
            "or leave --png out"
        ) from error


def write_png(
    path: Path, *, title: str, points: Sequence[str], series: Mapping[str, Sequence[float]]
) -> None:
    """Draw a group of bars for each point, one of each side.

    Raises:
        MeasurementError: matplotlib is missing.
    """
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(2 + 2 * len(points), 5), layout="constrained")
    width = 0.8 / len(series)
    for index, (side, values) in enumerate(series.items()):
        left = [place + (index - (len(series) - 1) / 2) * width for place in range(len(points))]
        axes.bar(left, values, width, label=side)
    axes.set_xticks(range(len(points)), [point.replace(", ", "\n") for point in points])
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
