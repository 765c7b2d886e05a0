"""Pictures of measurements, by matplotlib, which only this module needs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_portable.errors import MeasurementError


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, or the bars of one colour.

    Attributes:
        name: For the legend.
        values: One for each place on the horizontal axis.
    """

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One set of axes.

    Attributes:
        title: Above it.
        across: Names of the places on the horizontal axis.
        across_label: Of the horizontal axis.
        up_label: Of the vertical axis, with its unit.
        series: What is drawn.
        bars: Bars from zero; otherwise lines, on a logarithmic axis.
    """

    title: str
    across: tuple[str, ...]
    across_label: str
    up_label: str
    series: tuple[Series, ...]
    bars: bool = False


def require() -> None:
    """Check, before a long measurement, that pictures can be drawn.

    Raises:
        MeasurementError: matplotlib is missing; says how to get it.
    """
    _pyplot()


def write_png(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts beside each other.

    Raises:
        MeasurementError: matplotlib is missing.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1, len(charts), figsize=(6 * len(charts), 4), squeeze=False, layout="constrained"
    )
    for chart, place in zip(charts, axes[0], strict=True):
        _draw(chart, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MeasurementError(
            f"--png needs matplotlib ({error}): pip install 'epd-portable[bench]', "
            "or leave --png out"
        ) from error


def _draw(chart: Chart, axes: Any) -> None:
    places = range(len(chart.across))
    width = 0.8 / len(chart.series)
    for index, series in enumerate(chart.series):
        if chart.bars:
            left = [place + (index - (len(chart.series) - 1) / 2) * width for place in places]
            axes.bar(left, series.values, width, label=series.name)
        else:
            axes.plot(places, series.values, marker="o", label=series.name)
    if not chart.bars:
        axes.set_yscale("log")
    axes.set_xticks(places, chart.across, rotation=30, ha="right")
    axes.set_title(chart.title)
    axes.set_xlabel(chart.across_label)
    axes.set_ylabel(chart.up_label)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
