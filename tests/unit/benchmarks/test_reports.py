from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from epd_benchmarks import report, step, transfer
from epd_benchmarks.stand_in import CommandDone
from epd_benchmarks.step import StepCase
from epd_benchmarks.transfer import TransferCase
from epd_portable.errors import MeasurementError

COMMAND = "epd-bench transfer --repeat 2"


def case(path: str, nbytes: int, *scales: float, encode_s: float = 0.01) -> TransferCase:
    found = TransferCase(path=path, nbytes=nbytes, encode_s=encode_s)
    for scale in scales or (1.0,):
        sent = CommandDone(at_s=7.0, memcpy_s=0.005 * scale)
        found.add(sent, CommandDone(at_s=7.0 + 0.01 * scale, step_s=7.0 + 0.006 * scale))
    return found


TRANSFERS = (
    case("tcp", 1 << 20, 1, 2),
    case("shm", 4096),
    case("shm", 4096, encode_s=0.0),
    case("shm", 1 << 20, 1, 2),
)


def transfer_page(**left_out: str) -> report.Document:
    return transfer.make_report(TRANSFERS, "Platform cpu.", left_out) | {"command": COMMAND}


def rows_of(page: report.Document) -> list[dict[str, str]]:
    [table] = page["tables"]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_page_begins_with_command_machine_and_omissions() -> None:
    page = report.to_markdown(transfer_page(ipc="cpu has no device memory"))
    assert page.index(COMMAND) < page.index("|")
    assert re.search(r"\d CPU cores.*, \d+ GiB; load average [\d.]+ before", page)
    assert "Platform cpu. Not measured: ipc (cpu has no device memory)." in page


def test_a_report_of_counters_can_be_written(tmp_path: Path) -> None:
    counted = Counter({"encode-0": 1.5})
    made = transfer_page() | {"samples": [{"cpu_s": counted}]}
    report.write(made, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert written["samples"] == [{"cpu_s": {"encode-0": 1.5}}]


def test_transfers_are_shown_against_memcpy_by_round() -> None:
    first, *others = rows_of(transfer_page())
    name = "path, size, grant"
    assert [*first.items()][:5] == [
        (name, "tcp, 1 MiB, granted before"),
        ("ratio", "2.00 (2.00–2.00)"),
        ("median, ms", "15.00"),
        ("p90, ms", "19.00"),
        ("placing, ms", "6.000"),
    ]
    assert [row[name] for row in others] == [
        "shm, 4 KiB, granted before",
        "shm, 4 KiB, granted after",
        "shm, 1 MiB, granted before",
    ]


def test_steps_are_shown_by_case_with_their_ratio() -> None:
    table = rows_of(
        step.make_report(
            [
                StepCase(decoding=256, items=32, waiting=waits, step_s=steps, asking_s=[10e-6] * 3)
                for waits, steps in ((0, [20e-6, 30e-6, 40e-6]), (1000, [40e-6, 50e-6, 90e-6]))
            ]
        )
    )
    assert [*table[0]][:3] == ["decoding × items", "waiting", "ratio"]
    assert [[*row.values()] for row in table] == [
        ["256 × 32", "0", "3.00", "30.0", "38.0", "10.0"],
        ["256 × 32", "1000", "5.00", "50.0", "82.0", "10.0"],
    ]


def test_tables_are_printed_even_when_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeasurementError, match="name another file"):
        report.finish(transfer_page(), tmp_path / "file" / "t.json")
    assert COMMAND in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outer", "shown"), [(0.25, "3.00 (2.00–4.00)"), (0.0, "3.00 (1.00–9.00)")]
)
def test_a_ratio_is_shown_with_its_spread(outer: float, shown: str) -> None:
    assert report.ratio([3.0, 1.0, 9.0, 2.0, 4.0], outer) == shown
