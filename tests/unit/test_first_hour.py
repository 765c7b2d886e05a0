"""The first hour on a device, rehearsed with stand-ins for its commands."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ci import first_hour
from ci.first_hour import FIGURES, STAGES, Stage
from epd_portable.bench.load.plan import read_points

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 10.0


def stage(name: str, script: str, limit_s: float = 60.0, **options: Any) -> Stage:
    return Stage(name=name, argv=("sh", "-c", script, name, "{out}"), limit_s=limit_s, **options)


def run(out: Path, *stages: Stage, wheels: str = "", budget_s: float = 600.0) -> tuple[bool, str]:
    said: list[str] = []
    good = first_hour.hour(stages, out=out, wheels=wheels, budget_s=budget_s, say=said.append)
    return good, "\n".join(said)


def told(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / FIGURES).read_text())
    return found


def test_figures_of_lines_and_of_files_come_into_one_file(tmp_path: Path) -> None:
    probe = stage("probe", """echo noise; echo '{"figure": "rate", "value": [1, 2]}'""")
    bench = stage("bench", """echo '{"a": 1}' > "$1/b.json" """, writes={"bench": "b.json"})
    assert run(tmp_path, probe, bench)[0]
    found = told(tmp_path)
    assert found["probe"]["figures"] == {"rate": [1, 2]}
    assert found["probe"]["tail"][0] == "noise"
    assert found["bench"]["figures"] == {"bench": {"a": 1}}


def test_a_stage_that_fails_ends_itself_and_not_the_hour(tmp_path: Path) -> None:
    good, _ = run(
        tmp_path,
        stage("first", "echo why >&2; exit 3"),
        Stage(name="none", argv=("/nowhere/at/all",), limit_s=1),
        stage("last", "true"),
    )
    assert not good
    found = told(tmp_path)
    assert [found[name]["status"] for name in ("first", "none", "last")] == [3, None, 0]
    assert found["first"]["tail"] == ["why"]
    assert "No such file" in found["none"]["tail"][0]


def runs(process: str) -> bool:
    """Tell whether a process, which may be ending just now, is there and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", ["", "setsid"], ids=["child", "session-of-its-own"])
def test_a_stage_that_takes_too_long_is_ended_with_its_children_and_its_figures_stay(
    tmp_path: Path, how: str
) -> None:
    line = '{"figure": "half", "value": 1}'
    script = f"echo '{line}'; {how} sleep 300 & echo $! > \"$1/child\"; wait"
    good, said = run(tmp_path, stage("long", script, limit_s=1.0))
    assert not good
    assert "long: was ended" in said
    assert told(tmp_path)["long"]["status"] is None
    assert told(tmp_path)["long"]["figures"] == {"half": 1}
    child = (tmp_path / "child").read_text().strip()
    end_s = time.monotonic() + DEADLINE_S
    while runs(child):
        assert time.monotonic() < end_s, "a child of the stage goes on"
        time.sleep(0.01)


def test_every_stage_calls_what_is_there() -> None:
    assert len({each.name for each in STAGES}) == len(STAGES)
    for each in STAGES:
        words = {"python": sys.executable, "out": "/out", "wheels": "/wheels"}
        argv = [word.format(**words) for word in each.argv]
        for word in argv:
            if re.fullmatch(r"(tests|configs)/\S+", word):
                assert (ROOT / word).exists(), word
        if "-m" in argv[:2] and argv[2].startswith("epd_portable."):
            command = importlib.import_module(argv[2]).main
            said = CliRunner().invoke(command, [*argv[3:], "--help"])
            assert said.exit_code == 0, said.output
            read_points([word for option, word in pairwise(argv) if option == "--point"])
        assert {f"/out/{file}" for file in each.writes.values()} <= set(argv)


def test_the_tests_of_engines_are_shared_out_between_two_stages() -> None:
    """What users get by themselves comes first; nothing is left out or run twice."""
    from tests.cuda.test_engines import WAYS

    expressions = [each.argv[-1] for each in STAGES if "tests/cuda/test_engines.py" in each.argv]
    otherwise = first_hour.OTHERWISE
    assert expressions == [
        f"TestByEveryPath and not ({otherwise})",
        f"not TestByEveryPath or {otherwise}",
    ]
    # As `-k` takes words: parts of names.
    early = [way for way in WAYS if not any(word in str(way) for word in otherwise.split(" or "))]
    assert [way.path for way in early] == ["ipc", "shm", "tcp"]
    assert all(way.runner is None and way.ahead for way in early)
