from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from epd_benchmarks.cli import main

LOAD = ["load", "--point", "rate=1", "--side"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["transfer", "--bytes", "5000"], "5000 is not a positive multiple of 4096 bytes"),
        (["transfer", "--bytes", "many"], "'many' is not a size"),
        (["transfer", "--platform", "abacus"], "'abacus' is not one of 'cuda', 'npu', 'cpu'"),
        (["transfer", "--path", "shm", "--path", "ipc"], "--path ipc: cpu has no device memory"),
        ([*LOAD, "x.yaml", "--point", "size=large"], "size.0: Input should be a valid integer"),
        (["step", "--steps", "9"], "9 is not in the range"),
        ([*LOAD, "x.yaml", "--point", "pictures=4"], "unknown key 'pictures'; known are rate,"),
    ],
)
def test_wrong_argument_is_named_with_status_2(arguments: list[str], words: str) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert words in text


def test_a_wrong_setting_ends_with_status_2(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("model: demo\n")
    code, text = run(*LOAD, str(file), "--set", "transfer.pth=tcp")
    assert code == 2
    assert "pth" in text
