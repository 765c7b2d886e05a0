from __future__ import annotations

import pytest

from epd_portable.bench.router.cases import Case, CaseFigure, Values
from epd_portable.bench.router.commands import AnswerRecord
from epd_portable.bench.router.faults import count_verdicts
from epd_portable.bench.router.measure import DIRECT, PROXY, CaseResults, Turn
from epd_portable.bench.router.questions import Verdict
from epd_portable.bench.router.report import make_report, reaches, show, times_better
from epd_portable.bench.router.stage import CaseRecord, Measured, Stage, Window
from epd_portable.bench.router.stand import Cores, Side

COST = CaseFigure(key="cost", what="cost: ms", clock="CPU", limit=2.0)
RATE = CaseFigure(key="rate", what="rate", clock="wall", better="higher", peer_limit=5)
BEFORE, AFTER = (Side(name=name, kind="router", path=".") for name in ("before", "after"))


def never(stage: Stage, measured: Measured) -> Values:
    raise AssertionError("nobody measures here")


CASE = Case(name="x", about="", figures=(COST, RATE), measure=never, seconds=lambda effort: 1.0)


def exchange(begin_s: float, total_s: float, verdict: Verdict = "right") -> AnswerRecord:
    return AnswerRecord(begin_s=begin_s, late_s=0, first_s=0, total_s=total_s, verdict=verdict)


def results() -> CaseResults:
    found = CaseResults(
        cases=(CASE,), sides=(BEFORE, AFTER, PROXY, DIRECT), cores=Cores.share([0, 1])
    )
    values: dict[str, list[Values]] = {
        "before": [{"cost": 4.0, "rate": 10.0}, {"cost": 6.0, "rate": 20.0}],
        "after": [{"cost": 1.0, "rate": 100.0}, {"cost": 1.0, "rate": 100.0}],
        "proxy": [{"cost": 2.0, "rate": 10.0}, {"cost": 2.0, "rate": 10.0}],
        "direct": [{"rate": 500.0}, {"rate": 1500.0}],
    }
    for side, turns in values.items():
        found.turns += [Turn(case="x", side=side, values=each) for each in turns]
    found.tallies["x", "after"] = CaseRecord(
        requests=9,
        not_right=1,
        detail="odd",
        wall_s=2.0,
        measured_s=1.0,
        others_s=0.5,
        late_s=[0.001],
    )
    found.missing["x", "direct"] = "it has no cost"
    found.revisions["after"] = "abc"
    return found


def test_above_one_is_better_whichever_way_a_figure_counts() -> None:
    less = times_better(COST, [1.0, 1.0], [4.0, 2.0])
    more = times_better(RATE, [4.0, 2.0], [1.0, 1.0])
    assert less == more
    assert less is not None and less.median == 3.0


def test_without_a_counterpart_there_is_no_ratio() -> None:
    assert times_better(COST, [1.0], []) is None
    assert times_better(COST, [1.0, 1.0], [1.0]) is None
    assert times_better(COST, [-0.5], [1.0]) is None


def test_a_goal_is_reached_from_its_own_side() -> None:
    assert [reaches(COST, value) for value in (1.9, 2.0, 2.1)] == [True, True, False]
    fast = CaseFigure(key="f", what="f", clock="wall", better="higher", limit=2.0)
    assert [reaches(fast, value) for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert reaches(RATE, 1.0) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.5, "1.50"),
        (132.4, "132"),
        (999.0, "999"),
        (43210.0, "43,210"),
        (-1.31, "-1.31"),
    ],
)
def test_figures_show_what_can_be_known(value: float, text: str) -> None:
    assert show(value) == text


def test_ratios_come_first_and_then_a_column_a_side() -> None:
    page = make_report(results(), command="epd-bench router", load_before=0.5)
    cpu, wall, measuring = page.tables
    compared = ("after by before", "before by proxy", "after by proxy")
    assert cpu.columns == (
        "what", *compared, "before", "after", "proxy", "at least", "reached"
    )  # fmt: skip
    assert cpu.rows[0][1] == "5.00 (4.50–5.50)"
    assert cpu.rows[0][4:] == (
        "5.00 (4.00–6.00)", "1.00 (1.00–1.00)", "2.00 (2.00–2.00)", "≤ 2", "before: no, after: yes"
    )  # fmt: skip
    assert wall.columns == (
        "what", *compared, "before", "after", "proxy", "direct", "at least", "reached"
    )  # fmt: skip
    assert wall.rows[0][-2:] == ("≥ 5 × the proxy", "before: no, after: yes")
    assert measuring.rows == (("x, after", "50%", "25%", "–", "–", "1.00", "9", "1"),)


def test_the_page_says_what_was_not_measured_and_what_was_not_right() -> None:
    page = make_report(results(), command="epd-bench router", load_before=0.5)
    text = "\n".join(page.notes)
    assert "x, direct: not measured: it has no cost" in text
    assert "x, after: 1 of 9 answers were not right; the first: odd" in text
    assert "Commits: after: abc" in text
    assert len(page.samples) == 8


def test_every_exchange_has_one_verdict() -> None:
    verdicts: list[Verdict] = ["right", "left", "right", "wrong"]
    found = count_verdicts([exchange(0, 1, verdict) for verdict in verdicts])
    assert found == {"right": 2, "error": 0, "wrong": 1, "left": 1}


def test_a_rate_is_from_the_first_sending_to_the_last_end() -> None:
    flow = [exchange(1.0, 0.5), exchange(1.2, 2.8), exchange(2.0, 0.1)]
    window = Window(cpu_s=0.6, flows={"a": flow}, tokens=0)
    assert window.rate("a") == pytest.approx(1.0)
    assert window.cpu_each_s("a") == pytest.approx(0.2)
    assert window.latency_s("a", 0.5) == 0.5
