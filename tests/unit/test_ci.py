"""The job matrix, the workflow and the scripts agree."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci import venv
from tests.kit.commands import run

ROOT = Path(__file__).resolve().parents[2]
MATRIX: list[dict[str, Any]] = yaml.safe_load((ROOT / "ci/matrix.yaml").read_text("utf-8"))["jobs"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
RUNNING = {job["name"]: job for job in MATRIX if job["status"] == "runs"}


@pytest.mark.parametrize("job", MATRIX, ids=lambda job: job["name"])
def test_a_job_either_runs_a_script_or_says_what_it_waits_for(job: dict[str, Any]) -> None:
    assert {"name", "status", "runs_on", "needs", "covers"} <= job.keys()
    if job["status"] == "runs":
        assert "blocked_on" not in job
    else:
        assert job["status"] == "planned"
        assert job["blocked_on"]


def test_every_script_of_a_job_exists_and_every_script_has_a_job() -> None:
    on_disk = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ci/jobs").iterdir()}
    assert {job["script"] for job in MATRIX if "script" in job} == on_disk
    assert all("script" in job for job in RUNNING.values())


@pytest.mark.parametrize("path", [*sorted((ROOT / "ci").rglob("*.sh")), ROOT / ".ci/run"], ids=str)
def test_a_script_can_be_run_and_stops_at_its_first_error(path: Path) -> None:
    text = path.read_text("utf-8")
    stops = {"#!/usr/bin/env bash": "set -euo pipefail", "#!/bin/sh": "set -eu"}
    first, _, rest = text.partition("\n")
    assert f"\n{stops[first]}\n" in rest
    assert os.access(path, os.X_OK)


def test_workflow_runs_exactly_the_jobs_of_the_matrix() -> None:
    assert WORKFLOW["jobs"].keys() == RUNNING.keys()
    for name, job in WORKFLOW["jobs"].items():
        assert job["runs-on"] == RUNNING[name]["runs_on"]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands == [RUNNING[name]["script"]]


UNAVAILABLE, BROKEN = 3, 2


@pytest.mark.parametrize(
    ("options", "environment", "status"),
    [
        (["--or-skip"], UNAVAILABLE, 0),
        (["--short"], UNAVAILABLE, UNAVAILABLE),
        (["--or-skip"], BROKEN, BROKEN),
    ],
)
def test_simulated_npu_is_skipped_only_where_allowed(
    tmp_path: Path, options: list[str], environment: int, status: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho 'env: no gcc' >&2; exit {environment}\n")
    python.chmod(0o755)
    result = run(ROOT / "ci/jobs/npu-sim.sh", *options, PYTHON=str(python))
    assert result.returncode == status
    assert "env: no gcc" in result.stderr
    assert ("# SKIPPED" in result.stderr) is (status == 0)


def test_the_simulated_job_runs_every_one_of_its_tests() -> None:
    script = (ROOT / "ci" / "jobs" / "npu-sim.sh").read_text("utf-8")
    named = tuple(re.findall(r"tests/[\w/.]+", script))
    tests = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/npu_sim/**/test_*.py")]
    assert tests
    assert [test for test in tests if not test.startswith(named)] == []


def test_engines_job_covers_the_releases_that_its_script_runs() -> None:
    script = (ROOT / "ci/jobs/engines.sh").read_text("utf-8")
    (default,) = re.findall(r"versions=\((\d.*)\)", script)
    assert re.findall(r"\d+\.\d+\.\d+", RUNNING["engines"]["covers"]) == default.split()


def test_oldest_python_is_equal_in_metadata_checks_and_jobs() -> None:
    """mypy compares the standard library, ruff the syntax, with the release they are given."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    oldest = settings["project"]["requires-python"].removeprefix(">=")
    assert settings["tool"]["mypy"]["python_version"] == oldest
    assert settings["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert ".".join(map(str, venv.OLDEST_PYTHON)) == oldest
    assert {job["needs"][0] for job in MATRIX} == {f"python {oldest}"}
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    versions = {
        step["with"]["python-version"] for step in steps if "python" in step.get("uses", "")
    }
    assert versions == {oldest}


@pytest.mark.parametrize(
    ("message", "is_rejected"),
    [
        ("docs: Remove old words\n\nThe reason.\n", False),
        ("Merge branch x\n", False),
        ("Remove old words\n", True),
        ("docs: remove old words\n", True),
        (f"docs: Remove {'x' * 72}\n", True),
    ],
)
def test_commit_hook_rejects_other_subjects(message: str, is_rejected: bool) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    (hook,) = [each for each in config["repos"][0]["hooks"] if each["id"] == "commit-subject"]
    assert bool(re.search(hook["entry"], message, re.MULTILINE)) == is_rejected


def test_release_workflow_publishes_what_job_built_without_token() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert any("ci/jobs/release.sh" in step.get("run", "") for step in jobs["build"]["steps"])
    assert set(jobs["publish"]["needs"]) == {"build", "test"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text
