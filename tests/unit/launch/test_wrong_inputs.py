"""What users are told of wrong inputs, word for word: the table ``wrong_inputs.yaml``.

A row is a command line (``run``), perhaps with the content of ``t.yaml`` (``file``), with other
files (``files``) and variables (``env``), and what is said (``says``); the status is 2 where
nothing else is written. ``TAKEN`` is a port in use, ``FREE`` what there is of ports and memory.
To write down what is said by now::

    python tests/unit/launch/test_wrong_inputs.py

and read the difference before committing it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner

import epd_portable
from epd_portable import envs
from epd_portable.bench import cli as bench
from epd_portable.launch import cli as launch
from epd_portable.launch.plan import file_checks
from epd_portable.launch.plan.engine_arguments import Argument, EngineArguments

PACKAGE = Path(epd_portable.__file__).parent
TABLE = Path(__file__).with_name("wrong_inputs.yaml")
ROWS: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text("utf-8"))
COMMANDS = {"epd-launch": launch.main, "epd-bench": bench.main}
FEWEST = 60


def argument(*types: str, choices: tuple[str, ...] = ()) -> Any:
    return lambda: Argument(types=frozenset(types), choices=choices)


ENGINE = EngineArguments(
    engine="vLLM 0.32.0",
    known={
        "gpu_memory_utilization": argument("float"),
        "max_model_len": argument("int"),
        "enforce_eager": argument("bool"),
        "limit_mm_per_prompt": argument("dict"),
        "dtype": argument("str", choices=("auto", "bfloat16", "float16")),
    },
)


@contextlib.contextmanager
def pinned(folder: Path) -> Iterator[None]:
    """Work in a folder, beside an engine whose arguments are known."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(file_checks, "installed_arguments", lambda: ENGINE),
            mock.patch.object(tempfile, "tempdir", str(folder)),
            mock.patch.dict("os.environ"),
        ):
            for variable in envs.TABLE:
                os.environ.pop(variable.name, None)
            yield
    finally:
        os.chdir(before)


def said(row: dict[str, Any]) -> tuple[int, str]:
    """Run a row; return the exit status and the message without the usage before it."""
    Path("t.yaml").write_text(row.get("file", "model: demo\n"), "utf-8")
    for name, content in row.get("files", {}).items():
        Path(name).write_text(content, "utf-8")
        Path(name).chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        program, *words = shlex.split(row["run"].replace("TAKEN", port))
        result = CliRunner().invoke(COMMANDS[program], words, env=row.get("env"))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    text = result.stderr
    if result.stdout:
        answer = json.loads(result.stdout)
        assert answer["schema_version"] == 1
        assert answer["error"]["exit_status"] == result.exit_code
        text = answer["error"]["message"]
    text = re.sub(r"\d+( is free| MiB free)", r"FREE\1", text.replace(port, "TAKEN"))
    text = text.replace(str(PACKAGE), "PACKAGE")
    return result.exit_code, text.rpartition("\nError: ")[2].strip()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_a_wrong_input_is_answered_word_for_word(row: dict[str, Any], tmp_path: Path) -> None:
    with pinned(tmp_path):
        status, text = said(row)
    assert text == row["says"].strip()
    assert status == row.get("status", 2)
    assert "Traceback" not in text and "instance of" not in text


def test_the_table_is_long_and_covers_both_commands() -> None:
    assert len(ROWS) >= FEWEST
    assert {row["run"].split()[0] for row in ROWS} == set(COMMANDS)
    cases = [json.dumps(row, sort_keys=True) for row in ROWS]
    assert len(set(cases)) == len(cases)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def main() -> None:
    """Write down what is said of every row."""
    rows = []
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder, pinned(Path(folder)):
            status, text = said(row)
        rows.append(
            {**{key: row[key] for key in row if key not in ("says", "status")}, "says": text}
            | ({} if status == 2 else {"status": status})
        )
    head = "".join(line for line in TABLE.open("r", encoding="utf-8") if line.startswith("#"))
    body = yaml.dump(rows, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    TABLE.write_text(head + body, "utf-8")
    print(f"wrote {len(rows)} rows to {TABLE}")


if __name__ == "__main__":
    sys.exit(main())
