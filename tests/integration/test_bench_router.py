"""The router's measurement, with real processes: what it counts, never how fast it is."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from epd_portable.bench.cli import main
from epd_portable.bench.router import stand
from epd_portable.bench.router.cases import Case, Values
from epd_portable.bench.router.commands import Done, Run
from epd_portable.bench.router.faults import count_verdicts
from epd_portable.bench.router.measure import ALL_CASES, DIRECT, PROXY, measure
from epd_portable.bench.router.questions import event
from epd_portable.bench.router.stage import Effort, Measured, Stage, set_up
from epd_portable.bench.router.stand import Cores, PlayedInstances
from epd_portable.errors import MeasurementError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="what is measured needs a core to itself"
)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    cores = Cores.share(sorted(os.sched_getaffinity(0)))
    with set_up([DIRECT], Effort(rounds=1, window_s=0.2), cores) as up:
        yield up


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["router", "--seconds", "0.3", "--rounds", "1", *arguments])


def test_two_versions_stand_beside_each_other_and_every_answer_is_right(tmp_path: Path) -> None:
    page = tmp_path / "router.json"
    sides = ["--side", f"before={ROOT}", "--side", f"after={ROOT}"]
    cases = ["--case", "text", "--case", "latency"]
    result = bench(*sides, *cases, "--no-proxy", "--json", str(page))
    assert result.exit_code == 0, result.output
    assert "after by before" in result.output
    data = json.loads(page.read_text())
    turns = [(turn["case"], turn["side"]) for turn in data["samples"]]
    assert turns == [
        ("text", "before"),
        ("text", "after"),
        ("text", "direct"),
        ("latency", "before"),
        ("latency", "after"),
    ]
    values = {(turn["case"], turn["side"]): turn["values"] for turn in data["samples"]}
    assert values["text", "before"]["cpu_ms"] > 0
    assert "cpu_ms" not in values["text", "direct"]
    assert all(row["not_right"] == 0 for row in data["summary"]["measuring"])
    assert all(row["requests"] > 0 for row in data["summary"]["measuring"])
    ours = psutil.Process().children(recursive=True)
    assert not [child for child in ours if "epd_portable.bench.router" in " ".join(child.cmdline())]


@pytest.mark.needs_vllm
def test_the_peer_answers_pictures_and_streams_and_sends_each_picture_to_be_encoded() -> None:
    cores = Cores.share(sorted(os.sched_getaffinity(0)))
    with set_up([PROXY], Effort(rounds=1, window_s=0.2), cores) as up:
        (proxy,) = up.sides
        pictures = {"connections": 2, "picture_bytes": 20_000}
        flows = [
            up.flow(proxy, "pictures", count=4, **pictures),
            up.flow(proxy, "streams", count=4, chunks=5, gap_ms=2, **pictures),
            up.flow(proxy, "texts", count=4, connections=1),
        ]
        window = up.run(proxy, *flows)
        counts = up.instances.counts()
    for flow in window.flows.values():
        assert [(each.verdict, each.detail) for each in flow] == [("right", "")] * 4
    assert (counts.requests, counts.jobs) == (12, 8)
    assert window.cpu_s > 0


def test_a_side_that_cannot_start_ends_it_with_its_reason(tmp_path: Path) -> None:
    router = tmp_path / "epd_portable/router"
    router.mkdir(parents=True)
    for folder in (router.parent, router):
        (folder / "__init__.py").touch()
    (router / "__main__.py").write_text("raise SystemExit('no router today')")
    result = bench("--side", f"broken={tmp_path}", "--case", "text", "--no-proxy")
    assert result.exit_code == 1
    assert "no router today" in result.output


def fails(stage: Stage, measured: Measured) -> Values:
    raise MeasurementError("it fell over")


def test_a_case_that_fails_does_not_take_the_others_with_it() -> None:
    broken = Case(name="broken", about="", figures=(), measure=fails, seconds=lambda effort: 1.0)
    effort = Effort(rounds=1, window_s=0.2)
    results = measure([broken, ALL_CASES["text"]], [DIRECT], effort, report=lambda line: None)
    assert results.failed == {("broken", "direct"): "it fell over"}
    assert [(turn.case, turn.side) for turn in results.turns] == [("text", "direct")]


def test_those_who_leave_are_counted_and_nobody_works_for_them_any_more(stage: Stage) -> None:
    (direct,) = stage.sides
    flow = stage.flow(
        direct,
        "leaving",
        count=20,
        rate=200.0,
        chunks=4,
        gap_ms=100,
        leave=5,
        leave_after_s=0.15,
    )
    before = stage.instances.counts()
    window = stage.run(direct, flow)
    found = count_verdicts(window.flows["leaving"])
    assert found == {"right": 15, "error": 0, "wrong": 0, "left": 5}
    stage.instances.wait_until_quiet()
    after = stage.instances.counts()
    assert after.requests - before.requests == 20
    assert after.gone - before.gone == 5


def test_answers_that_are_held_go_on_until_they_are_released(stage: Stage) -> None:
    (direct,) = stage.sides
    flow = stage.flow(direct, "held", count=8, connections=4, chunks=1000, gap_ms=20, hold=True)
    window = stage.run(direct, flow)
    assert [each.verdict for each in window.flows["held"]] == ["right"] * 8
    assert stage.instances.counts().open == 8
    assert 40 < stage.watch(direct, 0.5).tokens <= 220
    stage.release()
    assert stage.instances.counts().open == 0


def test_an_instance_that_is_killed_cuts_answers_also_within_a_token(stage: Stage) -> None:
    _, address = stand.pair(1)
    played = PlayedInstances([address], stage.secret_file, stage.cores, stage.folder, halves=True)
    with played:
        asked = Measured(DIRECT, address.port, None)
        flow = stage.flow(asked, "cut", count=10, rate=100.0, chunks=100, gap_ms=200)
        stage.load.begin(Run(flows=[flow]))
        deadline_s = time.monotonic() + 10
        while played.counts().open < 10:
            assert time.monotonic() < deadline_s
    exchanges = stage.load.hear(Done).flows["cut"]
    assert count_verdicts(exchanges)["wrong"] == 10
    received = [int(re.findall(r"broken off after (\d+) bytes", e.detail)[0]) for e in exchanges]
    tokens = [len(event(flow.first_number + index, 0)) for index in range(10)]
    assert any(nbytes % token for nbytes, token in zip(received, tokens, strict=True))
