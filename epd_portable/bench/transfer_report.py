"""Turns transfer samples into tables, a chart and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from epd_portable.bench.chart import Chart, Series
from epd_portable.bench.report import Plain, Report, Table, conditions, format_bytes
from epd_portable.bench.stats import paired_ratio, quantile, summarize
from epd_portable.bench.transfer import TransferPlace, TransferSample

_PARTS = ("grant_wait_s", "write_s", "notice_s", "place_s")


def make_report(
    samples: Sequence[TransferSample],
    place: TransferPlace,
    *,
    left_out: Mapping[str, str],
    command: str,
    encode_s: float,
    load_before: float,
) -> Report:
    """Return the report of `epd_portable.bench.transfer.measure`'s samples.

    Args:
        samples: Of all paths and sizes.
        place: Where they were measured.
        left_out: Paths that were not measured, with the reason.
        command: That made them.
        encode_s: Time from an order to its output.
        load_before: See `conditions`.
    """
    groups = by_case(samples)
    return Report(
        title="From the encoder's output to the placed tensor, by path and size",
        command=command,
        conditions=conditions(load_before),
        notes=(
            _where(place, left_out),
            "One producer and one consumer process for each path, no engine; the combinations take "
            "turns. The consumer looks for news every 0.1 ms; an engine does so between steps.",
            f"The order comes {encode_s * 1000:g} ms before the output, so a grant that is not "
            "there by then is waited for.",
            "Ratio: total time by that of a memcpy of the same bytes right before, median of the "
            "pairs with their quartiles. Other times are medians over all rounds.",
            *_on_devices(place),
        ),
        tables=(_ratios(groups), _parts(groups)),
        summary=[
            {"platform": place.platform, **_summary(path, nbytes, group)}
            for (path, nbytes), group in groups.items()
        ],
        samples=[dataclasses.asdict(sample) for sample in samples],
    )


def make_chart(samples: Sequence[TransferSample]) -> Chart:
    """Return median times by size, one line a path and one for memcpy."""
    groups = by_case(samples)
    sizes = sorted({nbytes for _, nbytes in groups})
    lines = [
        Series(
            name=path,
            values=tuple(_median_ms(groups[path, nbytes], "total_s") for nbytes in sizes),
        )
        for path in dict.fromkeys(path for path, _ in groups)
    ]
    copies = [
        quantile([sample.memcpy_s for sample in samples if sample.nbytes == nbytes], 0.5) * 1000
        for nbytes in sizes
    ]
    return Chart(
        title="Encoder output to placed tensor",
        across=tuple(map(format_bytes, sizes)),
        across_label="size of the item",
        up_label="median, ms",
        series=(*lines, Series(name="memcpy", values=tuple(copies))),
    )


def by_case(samples: Sequence[TransferSample]) -> dict[tuple[str, int], list[TransferSample]]:
    """Return the samples of each path and size, paths in the order of measuring, sizes rising."""
    paths = list(dict.fromkeys(sample.path for sample in samples))
    order = sorted(samples, key=lambda sample: (paths.index(sample.path), sample.nbytes))
    groups: dict[tuple[str, int], list[TransferSample]] = {}
    for sample in order:
        groups.setdefault((sample.path, sample.nbytes), []).append(sample)
    return groups


def _where(place: TransferPlace, left_out: Mapping[str, str]) -> str:
    ends = "both ends on its cores"
    if place.is_device:
        ends = f"producer on device {place.producer}, consumer on device {place.consumer}"
        if place.devices == 1:
            ends = "both ends on device 0, the only one"
    found = f"Platform {place.platform} ({place.runtime}): {ends}."
    reasons = "; ".join(f"{path} ({reason})" for path, reason in left_out.items())
    return f"{found} Not measured: {reasons}." if reasons else found


def _on_devices(place: TransferPlace) -> tuple[str, ...]:
    if not place.is_device:
        return ()
    return (
        "Outputs are made on the producer's device. Placed means that the copy into the consumer's "
        "encoder cache is complete, not only queued. Memcpy is a copy from the one device to the "
        "other within one process, until its event has passed.",
    )


def _ratios(groups: dict[tuple[str, int], list[TransferSample]]) -> Table:
    rows = []
    for (path, nbytes), group in groups.items():
        total = summarize([sample.total_s for sample in group])
        ratio = paired_ratio(
            [sample.total_s for sample in group], [sample.memcpy_s for sample in group]
        )
        rows.append(
            (
                f"{path}, {format_bytes(nbytes)}",
                str(ratio),
                f"{total.median * 1000:.2f}",
                f"{total.p90 * 1000:.2f}",
                f"{_median_ms(group, 'memcpy_s'):.3f}",
                f"{nbytes / total.median / 1e9:.3g}",
                str(total.count),
            )
        )
    return Table(
        title="Against memcpy of the same bytes",
        columns=("path, size", "ratio", "median, ms", "p90, ms", "memcpy, ms", "GB/s", "rounds"),
        rows=tuple(rows),
    )


def _parts(groups: dict[tuple[str, int], list[TransferSample]]) -> Table:
    rows = [
        (
            f"{path}, {format_bytes(nbytes)}",
            *(f"{_median_ms(group, part):.3f}" for part in _PARTS),
        )
        for (path, nbytes), group in groups.items()
    ]
    return Table(
        title="Where the time goes, medians in ms",
        columns=("path, size", "wait for grant", "write", "written to landed", "landed to placed"),
        rows=tuple(rows),
    )


def _summary(path: str, nbytes: int, group: Sequence[TransferSample]) -> dict[str, Plain]:
    total = [sample.total_s for sample in group]
    ratio = paired_ratio(total, [sample.memcpy_s for sample in group])
    return {
        "path": path,
        "nbytes": nbytes,
        "total_s": dataclasses.asdict(summarize(total)),
        "ratio_to_memcpy": dataclasses.asdict(ratio),
        "medians_ms": {part: _median_ms(group, part) for part in (*_PARTS, "memcpy_s")},
        "gigabytes_per_s": nbytes / quantile(total, 0.5) / 1e9,
    }


def _median_ms(group: Sequence[TransferSample], part: str) -> float:
    return quantile([getattr(sample, part) for sample in group], 0.5) * 1000
