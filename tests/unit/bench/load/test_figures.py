from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_portable.bench import report
from epd_portable.bench.load import archive, figures
from epd_portable.bench.load import report as load_report
from epd_portable.bench.load.charts import make_charts
from epd_portable.bench.load.commands import Ask, ClientsDone, TimedAnswer
from epd_portable.bench.load.measure import LoadResults
from epd_portable.bench.load.plan import Limits, LoadPlan, LoadPoint, SearchRange
from epd_portable.bench.load.record import MeasuredRequest, SideTurn, TracedTurn, records, refusal
from epd_portable.bench.load.requests import Mix
from epd_portable.bench.load.search import Findings
from epd_portable.bench.load.sides import read_sides
from epd_portable.bench.load.stages import RequestStages
from epd_portable.bench.load.watch import Counted, Memory
from epd_portable.bench.provenance import Provenance
from epd_portable.bench.traces import Handover
from epd_portable.errors import ConfigError

POINT = LoadPoint(mix=Mix(), rate=2.0)
SIDES = read_sides(["configs/1e1pd.yaml", "replicas:2"])


def request(scale: float = 1.0, *, kind: str = "text", **changed: Any) -> MeasuredRequest:
    usual: dict[str, Any] = {
        "kind": kind,
        "pictures": int(kind == "pictures"),
        "sent_s": 1.0,
        "late_s": 0.001,
        "ttft_s": 0.1 * scale,
        "tpot_s": 0.02 * scale,
        "e2e_s": 0.5 * scale,
        "longest_gap_s": 0.03 * scale,
        "tokens": 3,
        "prompt_tokens": 400,
    }
    return MeasuredRequest(**{**usual, **changed})


def turn(side: str, *requests: MeasuredRequest, number: int = 0, **changed: Any) -> SideTurn:
    usual: dict[str, Any] = {
        "point": POINT.key,
        "turn": number,
        "side": side,
        "requests": requests,
        "wall_s": 4.0,
        "cpu_s": {"engine-0": {"API server": 0.5, "engine core": 1.5}},
        "memory": {"engine-0": Memory(rss_bytes=3 << 20, pss_bytes=2 << 20)},
        "counted": Counted(outcomes={"encoded": 1.0}) if side == "ours" else Counted(),
        "client_cpu_s": 0.04,
    }
    return SideTurn(**{**usual, **changed})


def setting(**changed: Any) -> load_report.Setting:
    usual: dict[str, Any] = {
        "points": (POINT,),
        "seconds": 10.0,
        "requests": 10,
        "rounds": 2,
        "warm_up": 1,
        "seed": 0,
        "limits": Limits(ttft_s=0.3),
        "search": None,
        "replay": (),
        "timeout_s": 10.0,
        "max_late_s": 0.05,
        "max_client_share": 0.8,
    }
    plan = LoadPlan(**{**usual, **changed})
    return load_report.Setting(
        plan=plan,
        sides=SIDES,
        equal="Every side has the same 2 cores.",
        together=True,
        facts={"platform": "cpu"},
        fingerprint=plan.fingerprint(platform="cpu"),
        command="epd-bench load",
        load_before=0.1,
    )


def results(*turns: SideTurn) -> LoadResults:
    return LoadResults(turns=list(turns), words_per_token=0.5)


TWO_ROUNDS = results(
    *(
        turn(side, request(scale * noise), request(scale * noise, kind="pictures"), number=number)
        for number, noise in enumerate((1.0, 3.0))
        for side, scale in (("ours", 1.0), ("replicas", 2.0))
    )
)


def test_ratios_are_taken_within_a_round() -> None:
    page = load_report.make_report(TWO_ROUNDS, setting())
    first = page.tables[0]
    assert first.title == "ours by the other sides"
    (row,) = (dict(zip(first.columns, row, strict=True)) for row in first.rows)
    assert (row["load"], row["by"]) == (POINT.key, "replicas")
    # 0.1 by 0.2 and 0.3 by 0.6; the quotient of the sums of rounds would hide one of them.
    assert row["TTFT p99, text"] == "0.50 (0.50–0.50)"
    assert (row["rounds"], row["requests, with pictures"]) == ("2", "4, 2")


def test_the_first_table_has_what_users_decide_by_with_the_range_of_the_rounds() -> None:
    scales = ((1.0, 2.0), (1.0, 1.0), (3.0, 2.0), (4.0, 2.0))
    cpu = ((1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (30.0, 1.0))
    found = results(
        *(
            turn(
                side,
                request(scale),
                request(scale, kind="pictures"),
                number=number,
                cpu_s={"engine-0": {"engine core": used}},
            )
            for number, both in enumerate(zip(scales, cpu, strict=True))
            for side, scale, used in zip(("ours", "replicas"), *both, strict=True)
        )
    )
    table = load_report.make_report(found, setting()).tables[0]
    assert table.columns[2:-3] == (
        "TPOT p99, all",
        "TTFT p99, all",
        "TTFT p99, text",
        "TTFT p50, pictures",
        "TTFT p99, pictures",
        "longest ITL p50, text",
        "CPU time",
    )
    # 0.5, 1, 1.5 and 2: quartiles would be 0.88 and 1.63. Bold is where ours loses.
    assert set(table.rows[0][2:-4]) == {"**1.25** (0.50–2.00)"}
    # The median of the rounds, in which the last one counts no more than the others.
    assert table.rows[0][-4] == "**2.50** (1.00–30.00)"


def spread_over(window_s: float, *longest_s: float) -> list[MeasuredRequest]:
    """Requests ten to each third of a window, each third's answered after so long."""
    return [
        request(sent_s=window_s * (10 * third + number + 1) / 30, e2e_s=e2e_s)
        for third, e2e_s in enumerate(longest_s)
        for number in range(10)
    ]


def test_a_cell_whose_queue_grows_over_the_whole_window_says_so() -> None:
    grows = spread_over(15.0, 1.0, 3.0, 6.0)
    assert figures.queue_grew(turn("ours", *grows))
    # From none to as many as the answers' length makes, and no more: the rate is served.
    for e2e_s in (1.0, 4.0):
        assert not figures.queue_grew(turn("ours", *spread_over(15.0, e2e_s, e2e_s, e2e_s)))
    # One round in two is chance.
    assert not figures.over_capacity([turn("ours", *grows), turn("ours", request())])
    found = results(turn("ours", *spread_over(15.0, 1.0, 1.0, 1.0)), turn("replicas", *grows))
    tables = {table.title: table for table in load_report.make_report(found, setting()).tables}
    assert tables["ours by the other sides"].rows[0][-1] == "replicas"
    rows = [row[0].removeprefix(POINT.key) for row in tables["Times in ms: p50 / p90 / p99"].rows]
    assert rows == [": ours: text", ": replicas, over capacity: text"]


def test_few_requests_with_pictures_are_named_and_rounds_are_planned_until_there_are_enough() -> (
    None
):
    said = load_report.few_pictures(TWO_ROUNDS, setting())
    assert said == [f"{POINT.key}: 2 requests with pictures, fewer than 30"]
    assert any(said[0] in note for note in load_report.make_report(TWO_ROUNDS, setting()).notes)
    many = turn("ours", *[request(kind="pictures")] * 30)
    assert load_report.few_pictures(results(many, turn("replicas")), setting()) == []
    plan = setting(rounds=0, seconds=15.0).plan
    assert setting(rounds=2).plan.rounds_of(POINT) == 2
    rounds = plan.rounds_of(POINT)
    assert sum(plan.pictures_in(POINT, number) for number in range(rounds)) >= 30
    assert sum(plan.pictures_in(POINT, number) for number in range(rounds - 1)) < 30
    often, texts = (
        dataclasses.replace(POINT, rate=rate, mix=Mix(share=share))
        for rate, share in ((50.0, 0.5), (2.0, 0.0))
    )
    assert (plan.rounds_of(often), plan.rounds_of(texts)) == (3, 3)


def test_figures_of_rounds_of_different_requests_are_not_compared() -> None:
    with pytest.raises(AssertionError):
        figures.ratio([turn("ours", request())], [turn("b", request(), number=1)], lambda t: 1.0)


def test_quantiles_are_those_of_answered_requests_of_a_kind() -> None:
    found = [turn("ours", request(), request(3.0), request(9.0, problem="503"))]
    assert figures.statistic(found, "all", "TTFT", "p90") == pytest.approx(0.28)
    assert figures.statistic(found, "text", "TTFT", "p50") == pytest.approx(0.2)
    assert figures.statistic(found, "all", "longest ITL", "p50") == pytest.approx(0.06)
    assert figures.statistic(found, "pictures", "TTFT", "p50") is None
    assert figures.failures(found) == 1


def test_goodput_counts_answers_within_both_limits_by_the_time_of_sending() -> None:
    limits = Limits(ttft_s=0.15, tpot_s=0.05)
    one = turn(
        "ours",
        request(sent_s=0.5),
        request(sent_s=2.0),
        request(2.0, sent_s=1.0),
        request(tpot_s=0.06),
        request(problem="503"),
    )
    assert figures.goodput(one, limits) == pytest.approx(2 / 2.0)
    assert figures.throughput(one) == pytest.approx(12 / 4.0)


@pytest.mark.parametrize(("failed", "met"), [(0, True), (1, True), (2, False)])
def test_limits_are_met_by_a_quantile_that_counts_failures(failed: int, met: bool) -> None:
    ends = [*[request() for _ in range(100 - failed)], *[request(problem="503")] * failed]
    for limits in (Limits(ttft_s=0.2), Limits(tpot_s=0.1)):
        assert figures.meets([turn("ours", *ends)], limits) is met
    assert not figures.meets([turn("ours", *ends)], Limits(ttft_s=0.05))
    assert not figures.meets([turn("ours", *ends)], Limits(tpot_s=0.01))


def test_records_keep_each_answer_beside_what_was_asked() -> None:
    ask = Ask(at_s=0, seed=1, words=2, output_tokens=3)
    answer = TimedAnswer(
        sent_s=1.0,
        late_s=0.5,
        ttft_s=0.25,
        gaps_s=(0.0101249, 0.03),
        e2e_s=2.0,
        tokens=3,
        prompt_tokens=9,
        problem="",
    )
    (found,) = records([ask], ClientsDone(answers=(answer,)))
    assert (found.kind, found.pictures, found.longest_gap_s) == ("text", 0, 0.03)
    assert found.tpot_s == pytest.approx(0.0401249 / 2, abs=1e-6)


def refused(late_s: float, share: float) -> str:
    return refusal(
        [request(late_s=late_s)] * 10,
        client_cpu_s=share * 4,
        wall_s=4.0,
        max_late_s=0.05,
        max_client_share=0.8,
    )


def test_a_round_is_refused_if_the_clients_were_late_or_busy_and_the_remedy_is_named() -> None:
    assert refused(0.04, 0.7) == ""
    assert "p99 60 ms, --max-late-ms allows 50" in refused(0.06, 0.1)
    assert "leave one free" in refused(0.06, 0.1)
    assert "90% of a core" in refused(0.01, 0.9)


def test_a_round_with_a_refused_turn_counts_for_no_side_and_has_a_number_of_its_own() -> None:
    found = results(turn("ours", request()), turn("replicas", request(), refused="late"))
    assert found.good(POINT) == []
    assert found.next_turn(POINT) == 1
    assert found.refused() == [f"{POINT.key}, round 1, replicas: late"]


def traced() -> TracedTurn:
    ends = {"reach": 0.1, "encode": 0.3, "transfer": 0.4, "prefill": 0.5, "decode": 0.9}
    way = Handover(
        transfer="t",
        path="shm",
        nbytes=4096,
        granted_before=True,
        grant_wait_s=0.001,
        write_s=0.002,
        notice_s=0.004,
        place_s=0.008,
    )
    return TracedTurn(
        stages=(RequestStages(index=0, kind="pictures", sent_s=1.0, ends_s=ends),),
        handovers=(way,),
        provenance=Provenance(
            asked=1, by_path={"shm": 1}, local=0, failed=0, encoded={"encode-0": 1}
        ),
    )


def test_stages_are_shown_by_their_lengths_with_the_way_of_each_item() -> None:
    found = results(turn("ours", request(), traced=traced()), turn("replicas", request()))
    page = load_report.make_report(found, setting())
    titles = {table.title: table for table in page.tables}
    stages = titles["Stages of requests, in ms: p50 / p90"]
    assert stages.rows[0][1:-1] == (
        "100 / 100",
        "200 / 200",
        "100 / 100",
        "100 / 100",
        "400 / 400",
    )
    (way,) = titles[
        "From output to placed tensor inside the engines, in ms: p90, then medians"
    ].rows
    assert way[1:] == ("15.00", "15.00", "1.00", "2.00", "4.00", "8.00", "1")
    assert ("ours", "transferred by shm", "1") in titles["Where the encoder outputs came from"].rows


def test_every_row_of_every_table_has_a_cell_for_each_column() -> None:
    search = SearchRange(low=1.0, high=4.0)
    sought = dataclasses.replace(POINT, rate=0.0)
    searched = results(turn("ours", request(), traced=traced()), turn("replicas", request()))
    searched.found[sought.key] = {
        "ours": Findings(rates={2.0: True}),
        "replicas": Findings(rates={1.0: False, 2.0: True}),
    }
    pages = [
        load_report.make_report(TWO_ROUNDS, setting()),
        load_report.make_report(searched, setting(points=(sought,), search=search)),
    ]
    assert pages[1].tables[0].rows == (
        ("10% × 1 × 448 px: ours", "–", "2", "–", "–"),
        ("10% × 1 × 448 px: replicas", "–", "below 1", "1", "2"),
    )
    assert pages[1].tables[1].rows == (
        (f"{POINT.key}: ours", "met", "100", "20.0", "1", "1, 0"),
        (f"{POINT.key}: replicas", "met", "100", "20.0", "1", "1, 0"),
    )
    for table in (table for page in pages for table in page.tables):
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


@pytest.mark.parametrize(
    ("ours", "replicas", "shown"),
    [
        ({3.0: True, 3.2: False}, {2.0: True, 2.1: False}, "1.50"),
        ({4.0: True}, {2.0: True, 2.1: False}, "≥ 2.00"),
        ({2.0: True, 2.1: False}, {4.0: True}, "≤ 0.50"),
        ({4.0: True}, {4.0: True}, "–"),
        ({1.0: False}, {4.0: True}, "–"),
        # What was met above a missed rate does not count.
        ({2.0: True, 2.4: False, 4.0: True}, {2.0: True, 2.4: False}, "1.00"),
    ],
)
def test_where_a_search_ended_at_its_highest_rate_the_ratio_is_a_bound(
    ours: dict[float, bool], replicas: dict[float, bool], shown: str
) -> None:
    sought = dataclasses.replace(POINT, rate=0.0)
    searched = results(turn("ours", request()), turn("replicas", request()))
    searched.found[sought.key] = {
        "ours": Findings(rates=ours),
        "replicas": Findings(rates=replicas),
    }
    page = load_report.make_report(
        searched, setting(points=(sought,), search=SearchRange(low=1.0, high=4.0))
    )
    assert page.tables[0].rows[1][1] == shown


def test_charts_have_one_value_for_each_place_and_stages_where_there_are_traces() -> None:
    found = results(turn("ours", request(), traced=traced()), turn("replicas", request()))
    *charts, timeline = make_charts(found, setting())
    assert {len(series.values) for chart in charts for series in chart.series} == {1}
    assert [row.name for row in timeline.rows] == ["pictures 0"]
    assert timeline.rows[0].parts[0] == ("reach", 1.1)
    assert len(make_charts(TWO_ROUNDS, setting())) == len(charts)


def test_what_caches_saved_is_told_of_each_side() -> None:
    counted = Counted(
        encoded={"encoder": 3.0, "cache": 4.0, "local": 1.0}, prefix_queries=200.0, prefix_hits=50.0
    )
    asked = request(kind="pictures", pictures=8)
    found = results(
        turn("ours", asked, counted=counted, distinct_pictures=5), turn("replicas", asked)
    )
    page = load_report.make_report(found, setting())
    (table,) = (each for each in page.tables if each.title.startswith("What caches saved"))
    assert [row[1:] for row in table.rows] == [
        ("8", "5", "4", "200", "25.0%"),
        ("8", "–", "–", "–", "–"),
    ]


def test_what_fell_back_is_told_with_its_side() -> None:
    lost = Counted(outcomes={"encoded": 3.0, "local": 2.0}, fallbacks=1.0)
    found = results(turn("ours", request(), counted=lost), turn("replicas", request()))
    assert load_report.fell_back(found, setting()).startswith("ours: 2 pictures were not encoded")
    assert load_report.fell_back(TWO_ROUNDS, setting()) == ""
    chosen = Counted(outcomes={"encoded": 3.0, "local_first": 2.0, "stored": 4.0})
    found = results(turn("ours", request(), counted=chosen), turn("replicas", request()))
    assert load_report.fell_back(found, setting()) == ""


def kept(tmp_path: Path, found: LoadResults) -> Path:
    file = tmp_path / "load.json"
    page = load_report.make_report(found, setting())
    report.write(page, json_file=file, markdown_file=None)
    return file


def test_finished_rounds_are_read_back_as_they_were(tmp_path: Path) -> None:
    found = results(turn("ours", request(), traced=traced()), turn("replicas", request()))
    turns, words = archive.read_turns(kept(tmp_path, found), setting().fingerprint)
    assert words == 0.5
    assert json.loads(msgspec.json.encode(turns)) == json.loads(msgspec.json.encode(found.turns))


def test_rounds_of_other_requests_are_not_gone_on_with(tmp_path: Path) -> None:
    file = kept(tmp_path, TWO_ROUNDS)
    for other in ({"seed": 1}, {"seconds": 5.0}):
        with pytest.raises(ConfigError, match="its requests, sides or settings were others"):
            archive.read_turns(file, setting(**other).fingerprint)
    # More rounds, or other limits, are the same requests.
    archive.read_turns(file, setting(rounds=9, limits=Limits()).fingerprint)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"summary": {}}'])
def test_a_file_that_is_none_of_this_command_is_not_gone_on_with(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        archive.read_turns(file, "any")
    assert archive.read_turns(tmp_path / "none.json", "any") == ([], None)
