"""Common behaviour of both commands: options, failures and ends."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from epd_benchmarks import cli as bench
from epd_portable.config.secret import make_secret_file
from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch import cli as launch
from epd_portable.launch.commands.command_line import EXIT_STATUSES, CommandLine

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = {"epd-launch": launch.main, "epd-bench": bench.main}


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_both_commands_have_same_statuses_short_help_and_version(command: CommandLine) -> None:
    pages = [CliRunner().invoke(command, [word]).output for word in ("-h", "--help")]
    assert pages[0] == pages[1]
    assert in_one_line(EXIT_STATUSES) in in_one_line(pages[0])
    assert re.search(rf"\n +{command.name} .*configs/1e1pd.yaml", pages[0]), "it teaches by example"
    version = CliRunner().invoke(command, ["--version"]).output
    assert version.startswith(f"{command.name}, version ")
    assert "vllm" in version.lower()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for command in COMMANDS.values()
        for name in command.commands
        if name not in ("show", "logs")  # Its argument is JSON, and lines are lines.
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_each_command_has_short_help_and_json(command: CommandLine, name: str) -> None:
    # click keeps the names of the option from a command's first call, which may be by itself.
    assert CliRunner().invoke(command.commands[name], ["-h"]).exit_code == 0
    assert CliRunner().invoke(command, [name, "-h"]).exit_code == 0
    assert "--json" in {option for each in command.commands[name].params for option in each.opts}


def failing(error: BaseException) -> CommandLine:
    group = CommandLine(name="epd-test")

    @group.command()
    @click.option("--json", "as_json", is_flag=True)
    def work(as_json: bool) -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/log/x"),
            *(1, "epd-test: cannot read or write /var/log/x: No space left on device"),
        ),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
        (LaunchError("no redis://u:p@h"), 1, "epd-test: no redis://u:***@h"),
        (ConfigError("no"), 2, "epd-test: no"),
    ],
)
def test_an_error_is_one_line_with_its_status(error: BaseException, status: int, said: str) -> None:
    result = CliRunner().invoke(failing(error), ["work"])
    assert (result.exit_code, result.stderr.strip()) == (status, said)


def test_a_fault_of_ours_is_not_hidden() -> None:
    assert isinstance(CliRunner().invoke(failing(IndexError()), ["work"]).exception, IndexError)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_page_that_cannot_be_printed_is_one_line(unbuffered: str) -> None:
    code = "from epd_portable.launch.cli import main; main(['--help'])"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == ("epd-launch: cannot read or write output: No space left on device\n")


@pytest.mark.parametrize("name", ["plan", "up"])
def test_an_error_is_one_line_of_json_where_json_is_asked_for(name: str) -> None:
    result = CliRunner().invoke(launch.main, [name, "--json"])
    assert result.exit_code == 2
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "schema_version": 1,
        "event": "error",
        "error": {
            "type": "MissingParameter",
            "message": "Missing option '--config'.",
            "exit_status": 2,
        },
    }


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ("secret_file: /no/such", "secret_file: cannot be read: No such file"),
        ("transfer: {pool_bytes: 9000TiB}", "transfer.pool_bytes: 1 × 9437184000 MiB do not fit"),
        (
            "instances: {encode: {count: 0}, prefill_decode: {count: 0}, prefill: {count: 1}, "
            "decode: {count: 1}}",
            "NixlConnector needs the module 'nixl', which is not here: pip install epd-portable",
        ),
    ],
    ids=["missing file", "no space", "missing module"],
)
def test_plan_warns_of_what_up_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, refusal: str
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    make_secret_file(str(tmp_path / "s"))
    config = tmp_path / "t.yaml"
    config.write_text(f"model: demo\n{settings}\n".replace(": s\n", f": {tmp_path / 's'}\n"))
    words = ["--platform", "cpu", "--config", str(config), "--json"]
    result = CliRunner().invoke(launch.main, ["plan", *words])
    assert result.exit_code == 0
    assert [
        warning
        for warning in json.loads(result.stdout)["warnings"]
        if warning.startswith(f"up refuses this here: {refusal}")
    ]
    assert CliRunner().invoke(launch.main, ["up", *words]).exit_code == 2


def test_fixed_ports_are_those_of_plan_without_that_of_front(tmp_path: Path) -> None:
    config = tmp_path / "t.yaml"
    config.write_text("model: demo\nfront: {port: 1101}\nlaunch: {first_port: 1100}\n")
    words = ["plan", "--platform", "cpu", "--config", str(config), "--json"]
    plans = [json.loads(CliRunner().invoke(launch.main, words).stdout) for _ in range(2)]
    assert plans[0]["run_id"] != plans[1]["run_id"]
    for plan in plans:
        assert [spec["ports"] for spec in plan["processes"][:2]] == [
            {},
            {"control": 1100, "data": 1102},
        ]
