from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from epd_benchmarks import console, report, step, transfer
from epd_benchmarks.stand_in import CommandDone
from epd_benchmarks.stats import paired_ratio
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
CPU = transfer.describe_place("cpu", "torch 1", devices=1)


def transfer_page(*cases: TransferCase, **left_out: str) -> report.Report:
    made = transfer.make_report(cases or TRANSFERS, CPU, left_out)
    return dataclasses.replace(made, command=COMMAND)


def test_page_begins_with_command_machine_and_omissions() -> None:
    page = report.to_markdown(report.document(transfer_page(ipc="cpu has no device memory")))
    assert page.index(COMMAND) < page.index("|")
    assert re.search(r"\d CPU cores.*, \d+ GiB; load average [\d.]+ before", page)
    assert "Not measured: ipc (cpu has no device memory)." in page
    assert "device 0" not in page
    assert "both ends on device 0, the only one" in transfer.describe_place("npu", "x", 1)
    assert "consumer on device 1" in transfer.describe_place("npu", "x", 8)


def test_a_report_of_counters_can_be_written(tmp_path: Path) -> None:
    counted = Counter({"encode-0": 1.5})
    made = dataclasses.replace(transfer_page(), samples=[{"cpu_s": counted}])
    report.write(made, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert written["samples"] == [{"cpu_s": {"encode-0": 1.5}}]


def test_transfers_are_shown_against_memcpy_by_round() -> None:
    ratios, between = transfer_page().tables.values()
    name = "path, size, grant"
    assert [*ratios[0].items()][:5] == [
        (name, "tcp, 1 MiB, granted before"),
        ("ratio", "2.00 (2.00–2.00)"),
        ("median, ms", "15.00"),
        ("p90, ms", "19.00"),
        ("placing, ms", "6.000"),
    ]
    assert [row[name] for row in ratios[1:]] == [
        "shm, 4 KiB, granted before",
        "shm, 4 KiB, granted after",
        "shm, 1 MiB, granted before",
    ]
    assert [*between[0]] == [name, "by tcp", "by shm"]
    assert [(row["by tcp"], row["by shm"]) for row in between[:2]] == [
        ("–", "1.00 (1.00–1.00)"),
        ("–", "–"),
    ]
    _, between = transfer_page(case("shm", 4096, 1, 5), case("tcp", 4096, 3, 15)).tables.values()
    assert [(row["by shm"], row["by tcp"]) for row in between] == [
        ("–", "0.33 (0.33–0.33)"),
        ("3.00 (3.00–3.00)", "–"),
    ]
    assert len(transfer_page(case("shm", 4096)).tables) == 1


def test_steps_are_shown_by_case_with_their_ratio() -> None:
    [table] = step.make_report(
        [
            StepCase(decoding=256, items=32, waiting=waiting, step_s=steps_s, asking_s=[10e-6] * 3)
            for waiting, steps_s in ((0, [20e-6, 30e-6, 40e-6]), (1000, [40e-6, 50e-6, 90e-6]))
        ]
    ).tables.values()
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
        console.finish(transfer_page(), tmp_path / "file" / "t.json")
    assert COMMAND in capsys.readouterr().out


def test_series_of_different_lengths_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="longer"):
        paired_ratio([1.0], [1.0, 2.0])
