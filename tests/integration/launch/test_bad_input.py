"""Bad input to the command: status 2, one message with the remedy, no traceback, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from epd_portable.launch.environment import new_run_id, shm_prefix
from epd_portable.launch.run.sessions import SHM
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "1e1pd.yaml"
# What a run leaves is named by its id, and this is how other runs on this machine are told apart.
RUN_ID = new_run_id()
NAMED = f"from epd_portable.launch import cli; cli.new_run_id = lambda: '{RUN_ID}'; cli.main()"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Run ``epd-launch`` with a temporary folder and a run id of its own."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return warm.nursery().run("-c", NAMED, *arguments, env=environment, timeout=60)

    return run


def test_absent_platform_is_refused_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    result = command("--platform", "npu", "--config", CONFIG)
    assert (result.returncode, result.stdout) == (2, "")
    assert "platform npu cannot be used here: " in result.stderr
    assert "`epd-launch check` shows what can" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("epd-*"))
    assert not list(SHM.glob(f"{shm_prefix(RUN_ID)}*"))


def test_check_says_what_is_usable_and_why_the_rest_is_not(command: Command) -> None:
    pytest.importorskip("torch")
    result = command("check", "--json")
    findings = {item["name"]: item for item in json.loads(result.stdout)["findings"]}
    assert {"cuda", "npu", "cpu", "cpu/shm", "cpu/tcp"} <= findings.keys()
    assert findings["cpu"]["usable"]
    assert all(item["reason"] for item in findings.values())
    assert result.returncode == 0


def test_check_looks_into_the_environment_of_encode_instances(
    command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "apart.yaml"
    for folder, status in ((sys.prefix, 0), ("/nowhere", 1)):
        apart = f"encode: {{count: 1, platform: cpu, environment: {folder}}}"
        file.write_text(f"model: m\ninstances: {{{apart}, prefill_decode: {{count: 1}}}}\n")
        result = command("check", "--platform", "cpu", "--config", file, "--json")
        findings = {item["name"]: item for item in json.loads(result.stdout)["findings"]}
        there = findings[f"cpu by {folder}/bin/python"]
        assert (result.returncode, there["usable"]) == (status, not status), there["reason"]
        assert findings["cpu"]["usable"]


def test_check_works_where_torch_is_absent() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from epd_portable.launch.cli import main\n"
        "main(['check'])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stdout.count("torch cannot be imported") == 3
    assert result.stderr == ""
