"""The hook in tests/conftest.py that decides which tests run here."""

from __future__ import annotations

from pathlib import Path

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


def test_what_is_missing_skips_the_test_and_says_why(suite: pytest.Pytester) -> None:
    suite.makepyfile(ONE_MARKED_TEST.format(reason="no such device"))
    result = suite.runpytest()
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs_cuda: no such device*"])


def test_what_is_there_lets_the_test_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(ONE_MARKED_TEST.format(reason=None))
    suite.runpytest().assert_outcomes(passed=2)


def test_a_job_for_a_device_fails_when_its_tests_would_be_skipped(suite: pytest.Pytester) -> None:
    suite.makepyfile(ONE_MARKED_TEST.format(reason="no such device"))
    result = suite.runpytest("--require-device=cuda")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*no such device, and --require-device demands it*"])


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
