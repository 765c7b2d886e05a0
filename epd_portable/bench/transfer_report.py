"""Turns transfer samples into tables, a chart and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from epd_portable.bench.chart import Chart, Series
from epd_portable.bench.report import Plain, Report, Table, conditions, format_bytes
from epd_portable.bench.stats import paired_ratio, quantile, summarize
from epd_portable.bench.transfer import TransferCase, TransferPlace, TransferSample
from epd_portable.connector import registry

Groups = dict[TransferCase, list[TransferSample]]

_PARTS = ("grant_wait_s", "write_s", "notice_s", "place_s")


def make_report(
    samples: Sequence[TransferSample],
    place: TransferPlace,
    *,
    left_out: Mapping[str, str],
    command: str,
    load_before: float,
) -> Report:
    """Return the report of `epd_portable.bench.transfer.measure`'s samples.

    Args:
        samples: Of all paths and sizes.
        place: Where they were measured.
        left_out: Paths that were not measured, with the reason.
        command: That made them.
        load_before: See `conditions`.
    """
    groups = by_case(samples)
    times = " or ".join(f"{each * 1000:g}" for each in dict.fromkeys(s.encode_s for s in samples))
    return Report(
        title="From the encoder's output to the placed tensor, by path and size",
        command=command,
        conditions=conditions(load_before, measured=_measured(groups)),
        notes=(
            _where(place, left_out),
            "One producer and one consumer process for each path, no engine; the combinations take "
            "turns. The consumer rests until a message comes, 1 ms at most, and takes a turn.",
            f"The order comes {times} ms before the output, and a grant that is not there by then "
            "is waited for: most grants of a row were there before the output, or came after it.",
            "Control: from the output until the consumer's scheduler knows, without the write. "
            "Turns: those of the consumer that began since the output, with the one that placed "
            "the item.",
            "Ratio: total time by that of a memcpy of the same bytes right before, median of the "
            "pairs with their quartiles. Other times are medians over all rounds.",
            *_on_devices(place),
        ),
        tables=(_ratios(groups), *_between(groups), _parts(groups)),
        summary=[
            {"platform": place.platform, **_summary(case, group)} for case, group in groups.items()
        ],
        samples=[dataclasses.asdict(sample) for sample in samples],
    )


def make_chart(samples: Sequence[TransferSample]) -> Chart:
    """Return median times by size, one line a path and time to encode, and one for memcpy."""
    groups = by_case(samples)
    sizes = sorted({case.nbytes for case in groups})
    first = [(case, group) for case, group in groups.items() if case.nbytes == sizes[0]]
    lines = [
        Series(
            name=f"{case.path}, {_grant(group)}",
            values=tuple(
                _median_ms(groups[dataclasses.replace(case, nbytes=nbytes)], "total_s")
                for nbytes in sizes
            ),
        )
        for case, group in first
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


def by_case(samples: Sequence[TransferSample]) -> Groups:
    """Return the samples of each case: paths in the order of measuring, sizes rising."""
    paths = list(dict.fromkeys(sample.path for sample in samples))
    order = sorted(samples, key=lambda sample: (paths.index(sample.path), sample.nbytes))
    groups: Groups = {}
    for each in order:
        case = TransferCase(path=each.path, nbytes=each.nbytes, encode_s=each.encode_s)
        groups.setdefault(case, []).append(each)
    return groups


def _measured(groups: Groups) -> Iterator[str]:
    """Yield the modules of both ends of the paths, and of what encrypts."""
    for path in {case.path for case in groups}:
        entry = registry.entry(path)
        yield from (
            target.partition(":")[0] for target in (entry.transport, entry.receiver) if target
        )
    yield "epd_portable.connector.curve"


def _grant(group: Sequence[TransferSample]) -> str:
    before = sum(sample.granted_before for sample in group)
    return "granted before" if 2 * before > len(group) else "granted after"


def _name(case: TransferCase, group: Sequence[TransferSample]) -> str:
    return f"{case.path}, {format_bytes(case.nbytes)}, {_grant(group)}"


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


def _ratios(groups: Groups) -> Table:
    rows = []
    for case, group in groups.items():
        total = summarize([sample.total_s for sample in group])
        ratio = paired_ratio(
            [sample.total_s for sample in group], [sample.memcpy_s for sample in group]
        )
        rows.append(
            (
                _name(case, group),
                str(ratio),
                f"{total.median * 1000:.2f}",
                f"{total.p90 * 1000:.2f}",
                f"{_median_ms(group, 'memcpy_s'):.3f}",
                f"{case.nbytes / total.median / 1e9:.3g}",
                str(total.count),
            )
        )
    return Table(
        title="Against memcpy of the same bytes",
        columns=(
            "path, size, grant",
            "ratio",
            "median, ms",
            "p90, ms",
            "memcpy, ms",
            "GB/s",
            "rounds",
        ),
        rows=tuple(rows),
    )


def _between(groups: Groups) -> Iterator[Table]:
    """Yield the table of each path by each other; none of one path alone."""
    paths = tuple(dict.fromkeys(case.path for case in groups))
    if len(paths) == 1:
        return

    def ratio(case: TransferCase, path: str) -> str:
        group, peers = groups[case], groups.get(dataclasses.replace(case, path=path), [])
        if path == case.path or len(peers) != len(group):
            return "–"
        return str(paired_ratio([each.total_s for each in group], [each.total_s for each in peers]))

    yield Table(
        title="By another path, each item by that of the same round",
        columns=("path, size, grant", *(f"by {path}" for path in paths)),
        rows=tuple(
            (_name(case, group), *(ratio(case, path) for path in paths))
            for case, group in groups.items()
        ),
    )


def _parts(groups: Groups) -> Table:
    rows = [
        (
            _name(case, group),
            *(f"{_median_ms(group, part):.3f}" for part in (*_PARTS, "control_s")),
            f"{fmean(sample.turns for sample in group):.1f}",
        )
        for case, group in groups.items()
    ]
    return Table(
        title="Where the time goes, medians in ms",
        columns=(
            "path, size, grant",
            "wait for grant",
            "write",
            "written to landed",
            "landed to placed",
            "control",
            "turns, mean",
        ),
        rows=tuple(rows),
    )


def _summary(case: TransferCase, group: Sequence[TransferSample]) -> dict[str, Plain]:
    total = [sample.total_s for sample in group]
    ratio = paired_ratio(total, [sample.memcpy_s for sample in group])
    return {
        **dataclasses.asdict(case),
        "granted": _grant(group),
        "turns_mean": fmean(sample.turns for sample in group),
        "total_s": dataclasses.asdict(summarize(total)),
        "ratio_to_memcpy": dataclasses.asdict(ratio),
        "medians_ms": {
            part: _median_ms(group, part) for part in (*_PARTS, "control_s", "memcpy_s")
        },
        "gigabytes_per_s": case.nbytes / quantile(total, 0.5) / 1e9,
    }


def _median_ms(group: Sequence[TransferSample], part: str) -> float:
    return quantile([getattr(sample, part) for sample in group], 0.5) * 1000
