from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from epd_portable.bench.cli import main

LOAD = ["load", "--rate", "1", "--side"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_help_shows_commands_that_can_be_copied() -> None:
    code, text = run("--help")
    assert code == 0
    assert "epd-bench load --side ours=configs/1e1pd.yaml --side replicas:2" in text
    assert "epd-bench transfer --path shm" in text
    assert "epd-bench step --decoding 256 --items 32 --waiting 1000" in text
    assert "epd-bench router --side before=../old --side after=." in text
    assert "epd-bench plan --stages stages.yaml --devices 8" in text


@pytest.mark.parametrize("command", ["load", "transfer", "step", "router", "plan"])
def test_the_help_of_a_command_tells_its_exit_statuses_and_defaults(command: str) -> None:
    code, text = run(command, "--help")
    assert code == 0
    assert "Exit status: 0" in text
    assert "[default:" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["transfer", "--bytes", "5000"], "5000 is not a positive multiple of 4096 bytes"),
        (["transfer", "--bytes", "many"], "'many' is not a size"),
        (["transfer", "--path", "pigeon"], "'pigeon' is not one of"),
        (["transfer", "--repeat", "0"], "0 is not in the range"),
        (
            ["transfer", "--platform", "abacus"],
            "'abacus' is not one of 'cuda', 'npu', 'cpu'",
        ),
        (["transfer", "--path", "shm", "--path", "ipc"], "--path ipc: cpu has no device memory"),
        ([*LOAD, "x.yaml", "--size", "large"], "--size large: expected numbers, as in 1,2,4"),
        ([*LOAD, "x.yaml", "--size", "112,7"], "sides of pictures are 28 to 4096 pixels"),
        ([*LOAD, "x.yaml", "--preset", "hope"], "'hope' is not one of"),
        (["load", "--platform", "cpu"], "Missing option '--side'"),
        (["step", "--decoding", "0"], "0 is not in the range"),
        (["step", "--items", "65"], "65 is not in the range"),
        (["step", "--waiting", "-1"], "-1 is not in the range"),
        (["step", "--steps", "9"], "9 is not in the range"),
        (["router", "--case", "luck"], "'luck' is not one of"),
        (["router", "--side", "old"], "--side old: expected NAME=PATH"),
        (["router", "--side", "old=/dev/null"], "there is no epd_portable/router in /dev/null"),
        (["router", "--rounds", "0"], "0 is not in the range"),
        (["router", "--seconds", "0.1"], "0.1 is not in the range"),
    ],
)
def test_a_wrong_argument_ends_with_status_2_and_a_message_that_names_it(
    arguments: list[str], words: str
) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert words in text


def test_a_missing_topology_file_ends_with_status_2_before_anything_is_started(
    tmp_path: Path,
) -> None:
    code, text = run(*LOAD, str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml" in text


def test_a_wrong_setting_ends_with_status_2(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("model: demo\n")
    code, text = run(*LOAD, str(file), "--set", "transfer.pth=tcp")
    assert code == 2
    assert "pth" in text
