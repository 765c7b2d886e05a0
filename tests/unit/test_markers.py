"""The hook in tests/conftest.py that decides which tests run here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    plugins = request.config.pluginmanager.get_plugins()
    return next(each for each in plugins if getattr(each, "__file__", "") == str(CONFTEST))


@pytest.mark.parametrize(
    ("marker", "why_not", "required", "outcome"),
    [
        ("needs_cuda", "no such device", [], "skip: needs_cuda: no such device"),
        ("needs_cuda", None, ["cuda"], "run"),
        ("needs_cuda", "no such device", ["cuda"], "fail: needs_cuda: no such device, and"),
        ("needs_cuda", "no such device", ["npu"], "skip: needs_cuda: no such device"),
        ("plain", "no such device", ["cuda"], "run"),
    ],
)
def test_missing_need_skips_or_fails_with_its_reason(
    conftest: Any,
    monkeypatch: pytest.MonkeyPatch,
    marker: str,
    why_not: str | None,
    required: list[str],
    outcome: str,
) -> None:
    monkeypatch.setitem(conftest.REQUIREMENTS, "needs_cuda", lambda: why_not)
    item = SimpleNamespace(
        config=SimpleNamespace(getoption=lambda name: required),
        get_closest_marker=lambda name: True if name == marker else None,
    )
    try:
        conftest.pytest_runtest_setup(item)
        found = "run"
    except pytest.skip.Exception as skipped:
        found = f"skip: {skipped}"
    except pytest.fail.Exception as failed:
        found = f"fail: {failed}"
    assert found.startswith(outcome)
