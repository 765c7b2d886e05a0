from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from epd_portable.bench.cli import main
from tests.unit.bench.sizing.samples import LIGHT, stage_times

FOLDER = Path(__file__).parents[4] / "docs/measurements/2026-11-sizing"


@pytest.fixture
def stages(tmp_path: Path) -> str:
    file = tmp_path / "stages.yaml"
    file.write_text(stage_times(**LIGHT).model_dump_json())
    return str(file)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


FEW = ("--requests", "300", "--tpot-p95", "0.06", "--ttft-p95", "4")
MIX = ("--workload", "share=0.3,text=44,output=11")


def test_it_recommends_shows_every_way_and_keeps_the_figures(stages: str, tmp_path: Path) -> None:
    file = tmp_path / "out/plan.json"
    code, text = run("--stages", stages, "--devices", "3", *FEW, *MIX, "--json", str(file))
    assert code == 0, text
    assert "**Disaggregate: " in text
    for name in ("3 × one process", "1e2pd", "2e1pd"):
        assert f"| {name} |" in text
    assert "Simulated, not measured" in text
    kept = json.loads(file.read_text())
    assert kept["summary"]["best"]["encoders"] in (1, 2)
    assert kept["summary"]["recommendation"] in text
    assert len(kept["samples"]) == 3


@pytest.mark.full
def test_the_page_says_what_instances_owe_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[2])
    section = Path("docs/kubernetes.md").read_text().split("### How much an instance may owe")[1]
    section = section.split("\n## ")[0]
    said = re.findall(
        r"^\| (\w+) \| (\w+e\w+pd) \| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE
    )
    assert len(said) == 4
    commands = re.findall(r"^epd-bench plan (.+)$", section, re.MULTILINE)
    for traffic, command in zip(("first", "second"), commands, strict=True):
        code, text = run(*command.split())
        assert code == 0, text
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        found = {row[0]: (*row[6:8], row[-1]) for row in rows}
        asked = {way: tuple(cells) for name, way, *cells in said if name == traffic}
        assert asked and {way: found[way] for way in asked} == asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--stages'"),
        (["--stages", "none.yaml"], "none.yaml"),
        (["--stages", "FILE", "--workload", "share=2"], "less than or equal to 1"),
        (["--stages", "FILE", "--devices", "0"], "0 is not in the range"),
        (["--stages", "FILE", "--ttft-p95", "0"], "0.0 is not in the range"),
    ],
)
def test_wrong_input_ends_with_status_2_and_a_message_that_names_it(
    arguments: list[str], words: str, stages: str
) -> None:
    code, text = run(*[stages if word == "FILE" else word for word in arguments])
    assert code == 2
    assert words in text
