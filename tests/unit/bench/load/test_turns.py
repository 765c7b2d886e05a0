from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_portable.bench import report as reports
from epd_portable.bench.load import command, report
from epd_portable.bench.load.clients import Answers, LoadAnswer
from epd_portable.bench.load.measure import LoadResults
from epd_portable.bench.load.plan import LoadPicture, LoadPlan, LoadPoint, LoadRequest
from epd_portable.bench.load.setting import LoadSetting
from epd_portable.bench.load.sides import Allotment, read_sides
from epd_portable.bench.load.turns import Turn, make_turn, ratio
from epd_portable.errors import MeasurementError

POINT = LoadPoint(rate=2.0)
PLAN = LoadPlan(points=(POINT,), seconds=10.0, rounds=1, ttft_s=0.3)
SETTING = LoadSetting(
    plan=PLAN,
    sides=read_sides(["configs/1e1pd.yaml", "replicas:2"]),
    platform="cpu",
    topologies={},
    settings=(),
    allotment=Allotment(units={}, rest=()),
    folder=Path(),
    upstream_proxy=None,
)

Sent = tuple[LoadRequest, LoadAnswer]


def sent(scale: float = 1.0, *, pictures: int = 0, **changed: Any) -> Sent:
    usual: dict[str, Any] = {
        "late_s": 0.001,
        "ttft_s": 0.1 * scale,
        "tpot_s": 0.02 * scale,
        "itl_s": (0.01 * scale, 0.03 * scale),
        "e2e_s": 0.5 * scale,
        "tokens": 3,
        "prompt_tokens": 400,
        "problem": "",
    }
    shown = tuple(LoadPicture(seed=str(index), size=28) for index in range(pictures))
    request = LoadRequest(at_s=1.0, text="a", text_tokens=3, output_tokens=3, pictures=shown)
    return request, LoadAnswer(**{**usual, **changed})


def turn(side: str, *all_sent: Sent, number: int = 0, **changed: Any) -> Turn:
    usual: dict[str, Any] = {
        "point": POINT.key,
        "round": number,
        "side": side,
        "cpu_s": {"engine-0 API server": 0.5, "engine-0 engine core": 1.5},
        "memory_bytes": {"engine-0": 2 << 20},
        "counted": {"items encoded": 1} if side == "ours" else {},
        "client_cpu_s": 0.04,
        **changed,
    }
    done = Answers(
        answers=tuple(answer for _, answer in all_sent),
        cpu_s=usual.pop("client_cpu_s"),
        wall_s=4.0,
    )
    requests = [request for request, _ in all_sent]
    return make_turn(requests, done, PLAN, **usual)


def rows(found: LoadResults, title: str) -> list[dict[str, str]]:
    page = report.make_report(found, SETTING)
    (table,) = (rows for name, rows in page.tables.items() if name.startswith(title))
    return [dict(row) for row in table]


RATIOS = "ours by the other sides"
TWO_ROUNDS = LoadResults(
    turns=[
        turn(side, sent(scale * noise), sent(scale * noise, pictures=1), number=number)
        for number, noise in enumerate((1.0, 3.0))
        for side, scale in (("ours", 1.0), ("replicas", 2.0))
    ],
    words_per_token=0.5,
)


def test_the_first_table_has_what_users_decide_by_with_the_range_of_the_rounds() -> None:
    scales = ((1.0, 2.0), (1.0, 1.0), (3.0, 2.0), (4.0, 2.0))
    cpu = ((1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (30.0, 1.0))
    found = LoadResults(
        turns=[
            turn(
                side,
                sent(scale),
                sent(scale, pictures=1),
                number=number,
                cpu_s={"engine-0 engine core": used},
            )
            for number, both in enumerate(zip(scales, cpu, strict=True))
            for side, scale, used in zip(("ours", "replicas"), *both, strict=True)
        ]
    )
    (row,) = rows(found, RATIOS)
    assert (row["load"], row["by"], row["rounds"]) == (POINT.key, "replicas", "4")
    assert row["requests, with pictures"] == "8, 4"
    cells = list(row.items())[2:-2]
    assert [name for name, _ in cells] == [
        "TPOT p99, all",
        "TTFT p99, all",
        "TTFT p99, text",
        "TTFT p50, pictures",
        "TTFT p99, pictures",
        "E2E p50, pictures",
        "longest ITL p50, text",
        "CPU time",
    ]
    # 0.5, 1, 1.5 and 2: quartiles would be 0.88 and 1.63. Bold is where ours loses.
    assert {cell for _, cell in cells[:-1]} == {"**1.25** (0.50–2.00)"}
    # The median of the rounds, in which the last one counts no more than the others.
    assert row["CPU time"] == "**2.50** (1.00–30.00)"
    with pytest.raises(AssertionError):
        ratio([turn("ours", sent())], [turn("b", sent(), number=1)], lambda each: 1.0)


def test_quantiles_are_those_of_answered_requests_of_a_kind() -> None:
    found = turn("ours", sent(), sent(3.0), sent(9.0, problem="503"))
    assert found.quantile("all", "TTFT", "p90") == pytest.approx(0.28)
    assert found.quantile("text", "TTFT", "p50") == pytest.approx(0.2)
    assert found.quantile("all", "longest ITL", "max") == pytest.approx(0.09)
    assert found.quantile("pictures", "TTFT", "p50") is None
    assert (found.failed, found.problem) == (1, "503")


def test_goodput_counts_answers_within_the_limits() -> None:
    one = turn("ours", sent(), sent(), sent(4.0), sent(problem="503"))
    assert one.serving["goodput, requests/s"] == 2 / 4.0


def test_a_round_is_refused_if_the_clients_were_late_or_busy_and_the_remedy_is_named() -> None:
    def refused(late_s: float, share: float) -> str:
        return turn("ours", *[sent(late_s=late_s)] * 10, client_cpu_s=4 * share).refused

    assert refused(0.04, 0.7) == ""
    assert "p99 60 ms, at most 50" in refused(0.06, 0.1)
    assert "leave one free" in refused(0.06, 0.1)
    assert "90% of a core" in refused(0.01, 0.9)


def test_a_round_with_a_refused_turn_counts_for_no_side() -> None:
    late = turn("replicas", sent(late_s=1.0))
    found = LoadResults(turns=[turn("ours", sent()), late])
    assert found.good_rounds() == {}
    assert found.refused() == [f"{POINT.key}, round 1, replicas: {late.refused}"]


def test_what_became_of_pictures_and_what_caches_saved_is_shown_of_each_side() -> None:
    counted = {
        "items encoded": 3,
        "items local_first": 1,
        "encoded encoder": 3,
        "encoded cache": 4,
        "placed local": 1,
        "prefix queries": 200,
        "prefix hits": 50,
    }
    found = LoadResults(
        turns=[
            turn("ours", sent(pictures=8), counted=counted),
            turn("replicas", sent(pictures=8)),
        ]
    )
    ours, replicas = (list(row.values())[1:] for row in rows(found, "What became of"))
    assert ours == ["8", "encoded 3, local_first 1", "8", "4", "200", "25.0%"]
    assert replicas == ["8", "–", "8", "–", "–", "–"]
    assert report.find_fallbacks(found, SETTING) == ""
    lost = {"items local": 2, "untransferred": 1, "fallback local": 2}
    found = LoadResults(turns=[turn("ours", sent(), counted=lost), turn("replicas", sent())])
    said = report.find_fallbacks(found, SETTING)
    assert "ours: 2 pictures were not encoded" in said and "1 not transferred" in said
    ours, _ = (list(row.values()) for row in rows(found, "What became of"))
    assert ours[2] == "local 2, fallback local 2, fell back 1"
    with pytest.raises(MeasurementError, match="something fell back: ours: 2 pictures"):
        command.judge(found, SETTING, every=False)


def test_a_preset_fails_when_a_request_is_not_answered_and_other_runs_when_none_is() -> None:
    lost = turn("ours", sent(), sent(problem="status 503"))
    found = LoadResults(turns=[lost, turn("replicas", sent(), sent())])
    command.judge(found, SETTING, every=False)
    with pytest.raises(MeasurementError, match="ours answered 1 of 2 requests: status 503"):
        command.judge(found, SETTING, every=True)
    ours, replicas = rows(found, "As vllm bench serve")
    assert (ours["answered of asked"], replicas["answered of asked"]) == ("1 of 2", "2 of 2")


def test_the_figures_of_vllm_bench_serve_are_those_of_answers() -> None:
    shown = [sent(), sent(3.0), sent(9.0, problem="lost")]
    found = LoadResults(turns=[turn("ours", *shown), turn("replicas", *shown)])
    ours, _ = rows(found, "As vllm bench serve")
    assert ours["duration, s"] == "4.00"
    assert ours["requests/s"] == "0.50"
    assert ours["output tokens/s"] == "1.50"
    assert ours["all tokens/s"] == "201.50"
    assert (ours["TTFT mean, ms"], ours["TTFT p50, ms"]) == ("200.00", "200.00")
    assert ours["TTFT p99, ms"] == "298.00"
    assert (ours["TPOT mean, ms"], ours["ITL mean, ms"]) == ("40.00", "40.00")
    assert (ours["ITL p50, ms"], ours["ITL p99, ms"]) == ("30.00", "88.20")


def test_cpu_time_is_shown_by_process_and_memory_as_it_was_at_most() -> None:
    more = {"engine-0": 5 << 20}
    found = LoadResults(
        turns=[
            turn(side, sent(), number=n, memory_bytes=more if n else {"engine-0": 1})
            for n in range(2)
            for side in ("ours", "replicas")
        ]
    )
    ours, _ = rows(found, "CPU time")
    assert list(ours.values())[1:] == [
        "4.0",
        "2000",
        "engine-0 API server 500 (0.12), engine-0 engine core 1500 (0.38)",
        "engine-0 5",
    ]


def test_the_json_holds_a_line_for_each_turn_and_no_request(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    reports.write(report.make_report(TWO_ROUNDS, SETTING), file)
    document = json.loads(file.read_text())
    assert msgspec.convert(document["samples"], list[Turn]) == TWO_ROUNDS.turns
    assert document["summary"]["sides"] == {"ours": "configs/1e1pd.yaml", "replicas": "replicas:2"}
    assert all("answers" not in line for line in document["samples"])
