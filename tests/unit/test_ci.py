"""The job matrix, the workflow and the scripts agree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

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
        assert "script" not in job


def test_every_script_of_a_job_exists_and_every_script_has_a_job() -> None:
    on_disk = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ci/jobs").iterdir()}
    assert {job["script"] for job in RUNNING.values()} == on_disk


@pytest.mark.parametrize("path", [*sorted((ROOT / "ci").rglob("*.sh")), ROOT / ".ci/run"], ids=str)
def test_a_script_can_be_run_and_stops_at_its_first_error(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(path, os.X_OK)


def test_the_workflow_runs_exactly_the_jobs_that_the_matrix_says_run() -> None:
    assert WORKFLOW["jobs"].keys() == RUNNING.keys()
    for name, job in WORKFLOW["jobs"].items():
        assert job["runs-on"] == RUNNING[name]["runs_on"]


def test_the_workflow_calls_scripts_of_ci_and_nothing_else() -> None:
    for name, job in WORKFLOW["jobs"].items():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands == [RUNNING[name]["script"]]
