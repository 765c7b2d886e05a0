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


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineRow:
    """One bar of a timeline.

    Attributes:
        name: In front of it.
        begin: Where it begins.
        parts: Name and end of each part, one after the other.
    """

    name: str
    begin: float
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """Bars along a common time, whose parts are coloured by name.

    Attributes:
        title: Above it.
        across_label: Of the time, with its unit.
        rows: From the top.
    """

    title: str
    across_label: str
    rows: tuple[TimelineRow, ...]


_COLUMNS = 3


def require() -> None:
    """Check, before a long measurement, that pictures can be drawn.

    Raises:
        MeasurementError: matplotlib is missing; says how to get it.
    """
    _pyplot()


def write_png(charts: Sequence[Chart | TimelineChart], path: Path) -> None:
    """Draw charts beside each other, in rows of three.

    Raises:
        MeasurementError: matplotlib is missing.
    """
    pyplot = _pyplot()
    columns = min(_COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    places = list(axes.flat)
    for chart, place in zip(charts, places, strict=False):
        if isinstance(chart, TimelineChart):
            _draw_timeline(chart, place)
        else:
            _draw(chart, place)
    for place in places[len(charts) :]:
        place.set_axis_off()
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


def _draw_timeline(chart: TimelineChart, axes: Any) -> None:
    colours: dict[str, str] = {}
    for height, row in enumerate(chart.rows):
        begin = row.begin
        for name, end in row.parts:
            new = name not in colours
            colour = colours.setdefault(name, f"C{len(colours)}")
            label = name if new else None
            axes.barh(height, end - begin, left=begin, color=colour, label=label)
            begin = end
    axes.set_yticks(range(len(chart.rows)), [row.name for row in chart.rows])
    axes.invert_yaxis()
    axes.set_title(chart.title)
    axes.set_xlabel(chart.across_label)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
