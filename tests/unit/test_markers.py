"""The hook in tests/conftest.py that decides which tests run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

ONE_MARKED_TEST = """
    import conftest
    import pytest

    conftest.REQUIREMENTS["needs_cuda"] = lambda: {reason!r}

    @pytest.mark.needs_cuda
    def test_marked():
        pass

    def test_plain():
        pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text("utf-8"))
    pytester.makeini(
        "[pytest]\nmarkers = needs_cuda\naddopts = -ra -p no:cacheprovider -p no:asyncio\n"
    )
    return pytester


@pytest.mark.parametrize(
    ("reason", "options", "outcomes", "said"),
    [
        ("no such device", [], {"passed": 1, "skipped": 1}, "*needs_cuda: no such device*"),
        (None, [], {"passed": 2}, "*"),
        (
            "no such device",
            ["--require-device=cuda"],
            {"passed": 1, "errors": 1},
            "*no such device, and --require-device demands it*",
        ),
    ],
)
def test_missing_need_skips_or_fails_with_its_reason(
    suite: pytest.Pytester, reason: str | None, options: list[str], outcomes: Any, said: str
) -> None:
    suite.makepyfile(ONE_MARKED_TEST.format(reason=reason))
    result = suite.runpytest(*options)
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([said])


@pytest.mark.parametrize("simulated", [True, False])
def test_the_simulated_npu_is_tested_only_in_its_own_environment(
    suite: pytest.Pytester, simulated: bool
) -> None:
    suite.mkdir("npu_sim").joinpath("test_npu.py").write_text("def test_npu():\n    pass\n")
    suite.makepyfile("def test_plain():\n    pass\n")
    if simulated:
        suite.mkpydir("ascend_sim")
        suite.syspathinsert()
    suite.runpytest().assert_outcomes(passed=1 + simulated)
