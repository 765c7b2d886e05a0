from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from epd_portable.bench import console, report, step, transfer
from epd_portable.bench.step import StepCase
from epd_portable.bench.transfer import Samples, TransferCase, TransferSample
from epd_portable.errors import MeasurementError

COMMAND = "epd-bench transfer --repeat 2"


def case(path: str, nbytes: int, encode_s: float = 0.01) -> TransferCase:
    return TransferCase(path=path, nbytes=nbytes, encode_s=encode_s)


def sample(scale: float = 1.0) -> TransferSample:
    return TransferSample(total_s=0.01 * scale, placing_s=0.004 * scale, memcpy_s=0.005 * scale)


TRANSFERS: Samples = {
    case("tcp", 1 << 20): [sample(), sample(2)],
    case("shm", 1 << 20): [sample()],
    case("shm", 4096): [sample()],
    case("shm", 4096, 0.0): [sample(), sample()],
}


CPU = transfer.describe_place("cpu", "torch 1", devices=1)


def transfer_page(place: str = CPU, samples: Samples = TRANSFERS, **left_out: str) -> report.Report:
    return dataclasses.replace(transfer.make_report(samples, place, left_out), command=COMMAND)


def step_samples(*steps_s: float) -> list[tuple[float, float]]:
    return [(step_s, 10e-6) for step_s in steps_s]


STEPS = {
    StepCase(decoding=256, items=32, waiting=0): step_samples(20e-6, 30e-6, 40e-6),
    StepCase(decoding=256, items=32, waiting=1000): step_samples(40e-6, 50e-6, 90e-6),
}


def step_page() -> report.Report:
    return step.make_report(STEPS)


def test_a_page_begins_with_its_command_and_says_where_it_ran_and_what_was_left_out() -> None:
    page = report.to_markdown(transfer_page(ipc="cpu has no device memory"))
    assert page.index(COMMAND) < page.index("|")
    assert re.search(r"\d CPU cores.*, \d+ GiB; load average [\d.]+ before", page)
    assert "Not measured: ipc (cpu has no device memory)." in page
    assert "device 0" not in page
    assert "both ends on device 0, the only one" in transfer.describe_place("npu", "x", 1)
    assert "consumer on device 1" in transfer.describe_place("npu", "x", 8)


def test_transfers_are_shown_by_path_and_rising_size_with_the_ratio_first() -> None:
    ratios, parts, between = transfer_page().tables
    assert [row[0] for row in ratios.rows] == [
        "tcp, 1 MiB, granted before",
        "shm, 4 KiB, granted before",
        "shm, 4 KiB, granted after",
        "shm, 1 MiB, granted before",
    ]
    assert ratios.columns[1] == "ratio"
    assert ratios.rows[0][1:4] == ("2.00 (2.00–2.00)", "15.00", "19.00")
    assert parts.rows[1][1:] == ("6.000", "4.000")
    assert between.columns[1:] == ("by tcp", "by shm")
    assert not any(re.search(r"\d", cell) for row in between.rows for cell in row[1:])


def test_a_path_is_compared_with_another_round_by_round() -> None:
    shm = {case("shm", 4096): [sample(1), sample(5)]}
    page = transfer_page(samples={**shm, case("tcp", 4096): [sample(3), sample(15)]})
    assert [row[1:] for row in page.tables[2].rows] == [
        ("–", "0.33 (0.33–0.33)"),
        ("3.00 (3.00–3.00)", "–"),
    ]
    page = transfer_page(samples=shm)
    assert len(page.tables) == 2


def test_json_holds_every_sample_and_the_summary() -> None:
    data = json.loads(report.to_json(transfer_page()))
    assert sum(len(each["total_s"]) for each in data["samples"]) == 6
    assert data["samples"][0]["total_s"] == [0.01, 0.02]
    assert data["command"] == COMMAND
    assert [each["path"] for each in data["samples"]] == ["tcp", "shm", "shm", "shm"]
    granted = [row[0].rpartition(" ")[2] for row in data["tables"][0]["rows"]]
    assert granted == ["before", "before", "after", "before"]
    assert data["conditions"]["versions"]["epd-portable"]


def test_steps_are_shown_by_case_with_the_ratio_to_asking_alone_first() -> None:
    (table,) = step_page().tables
    assert table.columns[:3] == ("decoding × items", "waiting", "ratio")
    assert table.rows == (
        ("256 × 32", "0", "3.00", "30.0", "38.0", "10.0"),
        ("256 × 32", "1000", "5.00", "50.0", "82.0", "10.0"),
    )


def test_tables_are_printed_even_when_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeasurementError, match="name another file"):
        console.finish(transfer_page(), tmp_path / "file" / "t.json")
    assert COMMAND in capsys.readouterr().out
