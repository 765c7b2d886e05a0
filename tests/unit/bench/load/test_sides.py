from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epd_portable.bench.load import checkpoint, settings, watch
from epd_portable.bench.load.commands import Ask, PictureSpec, TimedAnswer
from epd_portable.bench.load.plan import LoadPoint
from epd_portable.bench.load.requests import Mix
from epd_portable.bench.load.sides import (
    api_cores,
    instance_count,
    read_side,
    read_sides,
    share_out,
    with_proxy,
)
from epd_portable.bench.load.stages import request_stages
from epd_portable.bench.traces import Event
from epd_portable.config.load import load_topology
from epd_portable.errors import ConfigError, MeasurementError

ROOT = Path(__file__).resolve().parents[4]
TOPOLOGY = str(ROOT / "configs" / "1e1pd.yaml")


def test_sides_are_read_with_or_without_a_name() -> None:
    texts = [
        "a.yaml",
        "new=b.yaml,transfer.path=tcp,router.port=1",
        "replicas:3",
        "up=upstream:1e1pd",
        "url:http://h:1/v1,http://h:2/",
        "replicas:1",
        "replicas:2,tuned",
        "dp:2",
        "upstream:1E1PD,tuned",
    ]
    found = read_sides(texts)
    assert [(side.name, side.kind) for side in found] == [
        ("ours", "topology"),
        ("new", "topology"),
        ("replicas", "replicas"),
        ("up", "upstream"),
        ("url", "url"),
        ("one", "replicas"),
        ("tuned-replicas", "replicas"),
        ("dp", "ranks"),
        ("tuned-upstream", "upstream"),
    ]
    assert [side.tuned for side in found] == [*[False] * 6, True, False, True]
    assert found[1].file == Path("b.yaml")
    assert found[1].settings == ("transfer.path=tcp", "router.port=1")
    assert found[2].count == 3
    assert found[4].urls == ("http://h:1", "http://h:2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hope", "expected NAME=WHAT"),
        ("replicas:0", "at least one"),
        ("dp:0", "at least one"),
        ("replicas:2,fast", "expected NAME=WHAT"),
        ("upstream:2E1PD", "one instance of each role"),
        ("url:ftp://h", "no address"),
        ("a=url:", "no address"),
    ],
)
def test_what_is_no_side_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_side(text)


def test_without_its_own_proxy_the_example_is_called_a_stand_in() -> None:
    sides = read_sides(["a.yaml", "replicas:2", "upstream:1E1PD", "upstream:1E1PD,tuned"])
    assert [side.name for side in with_proxy(sides, real=False)] == [
        *("ours", "replicas", "upstream-stand-in", "tuned-upstream-stand-in")
    ]
    assert with_proxy(sides, real=True) == sides


def test_two_sides_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called ours"):
        read_sides(["a.yaml", "b.yaml"])


def test_every_side_gets_the_same_cores_and_the_rest_is_for_the_others() -> None:
    found = share_out(
        {"ours": 2, "replicas": 2, "one": 1, "url": 0}, cores=range(6), devices=None, wanted=4
    )
    assert found.units == {
        "ours": [("2", "3"), ("4", "5")],
        "replicas": [("2", "3"), ("4", "5")],
        "one": [("2", "3", "4", "5")],
    }
    assert (found.total, found.rest, found.shared) == (4, (0, 1), False)


def test_ranks_have_as_many_seats_as_replicas() -> None:
    sides = read_sides(["replicas:2", "dp:2", "upstream:1E1PD", "replicas:1"])
    assert [instance_count(side, None) for side in sides] == [2, 2, 2, 1]


def test_api_servers_of_tuned_peers_run_where_the_launcher_lets_those_of_its_instances() -> None:
    sides = read_sides(["upstream:1E1PD", "upstream:1E1PD,tuned", "replicas:2,tuned", "dp:2,tuned"])
    counts = {side.name: instance_count(side, None) for side in sides}

    def more(cores: range) -> list[list[set[int]]]:
        allotment = share_out(counts, cores=cores, devices=None, wanted=2)
        return [[set(api_cores(side, at, allotment)) for at in (0, 1)] for side in sides]

    # On two cores only the encoder's is not full of steps.
    assert more(range(2)) == [[set(), set()], [set(), {0}], [set(), set()], [set(), set()]]
    assert more(range(3)) == [[set(), set()], [{0}, {0, 1}], [{0}, {0}], [{0}, {0}]]


def test_with_no_core_left_the_clients_share_those_of_the_instances() -> None:
    found = share_out({"ours": 2}, cores=(0, 1), devices=None, wanted=None)
    assert (found.units, found.rest, found.shared) == ({"ours": [("0",), ("1",)]}, (0, 1), True)


def test_where_only_counts_matter_all_instances_share_all_cores() -> None:
    counts = {"ours": 4, "one": 1, "url": 0}
    found = share_out(counts, cores=(0, 1), devices=None, wanted=None, crowded=True)
    assert found.units == {"ours": [("0", "1")] * 4, "one": [("0", "1")]}
    assert found.crowded and found.rest == (0, 1)


def test_devices_are_shared_out_in_the_same_way_and_cores_stay_free() -> None:
    found = share_out({"ours": 2, "one": 1}, cores=(0,), devices=("4", "5"), wanted=None)
    assert found.units == {"ours": [("4",), ("5",)], "one": [("4", "5")]}
    assert found.rest == (0,)


def test_instances_that_share_a_device_have_one_seat_and_peers_get_as_many_devices() -> None:
    (shared, peer) = read_sides(["shared=configs/1e1pd-one-device.yaml", "replicas:1"])
    whole = load_topology(ROOT / "configs/1e1pd-one-device.yaml", "cuda")
    apart = load_topology(ROOT / "configs/1e1pd.yaml", "cuda")
    counts = {"shared": instance_count(shared, whole), "replicas": instance_count(peer, whole)}
    assert counts == {"shared": 1, "replicas": 1}
    assert instance_count(shared, apart) == 2
    found = share_out(counts, cores=(0,), devices=("0",), wanted=None)
    assert found.units == {"shared": [("0",)], "replicas": [("0",)]}


@pytest.mark.parametrize(
    ("counts", "wanted", "words"),
    [
        ({"ours": 4, "replicas": 3}, None, "4 cores cannot be divided equally among the 3"),
        ({"ours": 5}, None, "a side wants 5 cores and there are 4"),
        ({"ours": 2}, 3, "3 cores cannot be divided equally among the 2"),
    ],
)
def test_sides_that_would_not_be_equal_are_refused(
    counts: dict[str, int], wanted: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        share_out(counts, cores=range(4), devices=None, wanted=wanted)


USUAL = LoadPoint(mix=Mix())


def test_a_point_differs_from_the_usual_one_in_what_it_names() -> None:
    found = settings.read_point("rate=2,share=0.3,pictures=1/4,size=112,text=9,output=8", USUAL)
    assert found.rate == 2.0
    assert found.mix == Mix(
        share=0.3, pictures=(1, 4), sizes=(112,), text_tokens=9, output_tokens=8
    )
    assert found.key == "2/s, 30% × 1/4 × 112 px, 9+8 tokens"
    closed = settings.read_point("concurrency=4", found)
    assert (closed.pace, closed.rate) == ("4 at once", 0.0)
    assert settings.read_point("rate=1,cv=3", USUAL).pace == "1/s (CV 3)"


@pytest.mark.parametrize(
    ("text", "words"),
    [("speed=1", "'speed' is none of rate"), ("rate=fast", "'fast' is no value of rate")],
)
def test_a_point_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings.read_point(text, USUAL)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["rate=1", "rate=1"], "is there twice"),
        (["share=0.5"], "nothing says how often"),
        (["rate=1,share=2"], "shares are 0 to 1"),
        (["rate=1,output=1"], "of an answer 2"),
        (["rate=1,size=9"], "28 to 4096"),
    ],
)
def test_points_that_cannot_be_asked_are_refused(texts: list[str], words: str) -> None:
    points = [settings.read_point(text, USUAL) for text in texts]
    with pytest.raises(ConfigError, match=words):
        settings.check_points(points, sought=False)


@pytest.mark.parametrize("text", ["1", "2:1", "0:3", "a:b"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        settings.read_range(text, 0.1)


@pytest.mark.parametrize(
    "text", ["small", "vision=0x64,language=1x128", "vision=1x60,language=1x128"]
)
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shape"):
        checkpoint.read_shape(text)


def asked(
    *texts: str, platform: str = "cpu", overrides: tuple[str, ...] = ()
) -> settings.SidesAsked:
    return settings.SidesAsked(
        sides=read_sides(texts),
        platform=platform,  # type: ignore[arg-type]
        settings=overrides,
        model="some/model",
        units=None,
    )


def test_plain_vllm_takes_the_arguments_of_the_topology_beside_it() -> None:
    question = asked("replicas:2", f"ours={TOPOLOGY}", overrides=("engine_args.seed=7",))
    found = settings.topologies(question)
    assert found["replicas"] is found["ours"]
    assert found["ours"].engine_args["seed"] == 7
    assert found["ours"].engine_args["dtype"] == "bfloat16"
    assert found["ours"].model == "some/model"


def test_sides_on_devices_get_the_same_devices_and_are_up_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    question = asked(f"ours={TOPOLOGY}", "replicas:2", platform="cuda")
    allotment = settings.allot(question, settings.topologies(question))
    assert allotment.units == {"ours": [("0",), ("1",)], "replicas": [("0",), ("1",)]}
    assert not settings.fits_together(question, allotment)
    assert "the same 2 devices" in settings.equal_words(question, allotment)


def test_a_process_outside_its_cores_is_found() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: nothing is outside")
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        part = watch.Part(name="engine-0", pid=process.pid, cores=frozenset(cores[:1]))
        with pytest.raises(MeasurementError, match="engine-0: a thread of process"):
            watch.check_cores([part])
        os.sched_setaffinity(process.pid, cores[:1])
        watch.check_cores([part])
        assert watch.cpu_s([part])["engine-0"]["engine-0"] > 0
        assert watch.memory([part])["engine-0"].pss_bytes > 0
        process.communicate()
    assert watch.cpu_s([part]) == {"engine-0": {}}


def test_cpu_time_is_counted_since_a_reading() -> None:
    before = {"a": {"x": 1.0, "gone": 5.0}}
    after = {"a": {"x": 3.0}, "new": {"y": 2.0}}
    assert watch.used(after, before) == {"a": {"x": 2.0}, "new": {"y": 2.0}}


def test_what_was_counted_since_is_told_without_what_did_not_happen() -> None:
    before = watch.Counted(outcomes={"encoded": 4, "local": 1}, fallbacks=1)
    after = watch.Counted(outcomes={"encoded": 6, "local": 1}, ladder={"local": 2}, fallbacks=1)
    assert after.since(before) == watch.Counted(
        outcomes={"encoded": 2}, ladder={"local": 2}, fallbacks=0
    )
    before = watch.Counted(encoded={"encoder": 2, "cache": 1}, prefix_queries=10, prefix_hits=4)
    after = watch.Counted(encoded={"encoder": 5, "cache": 1}, prefix_queries=30, prefix_hits=9)
    assert after.since(before) == watch.Counted(
        encoded={"encoder": 3}, prefix_queries=20, prefix_hits=5
    )


def answer(sent_s: float, problem: str = "") -> TimedAnswer:
    return TimedAnswer(
        sent_s=sent_s,
        late_s=0.0,
        ttft_s=0.5,
        gaps_s=(),
        e2e_s=1.0,
        tokens=2,
        prompt_tokens=2,
        problem=problem,
    )


def ask(pictures: int) -> Ask:
    picture = PictureSpec(seed=1, size=28, format="png")
    return Ask(at_s=0, seed=1, words=1, output_tokens=2, pictures=(picture,) * pictures)


def step(t_s: float, *names: str) -> Event:
    return {"event": "step", "t_s": t_s, "tokens": dict.fromkeys(names, 1)}


def arrival(name: str, *items: str) -> Event:
    return {"event": "request.arrived", "t_s": 100.02, "request": name, "awaited": list(items)}


def test_stages_are_told_from_events_of_all_instances() -> None:
    events: list[Event] = [
        {"event": "encode.begin", "t_s": 99.0, "items": ["a"]},
        arrival("cmpl-turn1-0-e", "a", "b"),
        arrival("cmpl-turn11-2-e", "a"),
        step(100.05, "chatcmpl-turn1-1-f", "turn11-2-e"),
        {"event": "encode.begin", "t_s": 100.1, "items": ["a", "b"]},
        step(100.2, "chatcmpl-turn1-1-f", "cmpl-turn1-0-e"),
        {"event": "encode.end", "t_s": 100.3, "items": ["a", "b"]},
        {"event": "item.placed", "t_s": 100.35, "mm_hash": "a"},
        {"event": "item.placed", "t_s": 100.4, "mm_hash": "b"},
    ]
    answers = [answer(0.0), answer(0.0), answer(0.0)]
    asks = [ask(1), ask(0), ask(0)]
    pictures, text = request_stages(events, asks, answers, turn_name="turn1", begin_s=100.0)
    assert (pictures.kind, text.kind) == ("pictures", "text")
    assert pictures.lengths_s == pytest.approx(
        {"reach": 0.1, "encode": 0.2, "transfer": 0.1, "prefill": 0.1, "decode": 0.5}
    )
    assert text.lengths_s == pytest.approx({"reach": 0.05, "prefill": 0.45, "decode": 0.5})


def test_requests_that_failed_or_lack_an_event_have_no_stages() -> None:
    events = [arrival("turn1-0", "a"), step(100.2, "turn1-0", "turn1-1")]
    answers = [answer(0.0), answer(0.0, problem="503"), answer(0.0)]
    asks = [ask(1), ask(0), ask(0)]
    assert request_stages(events, asks, answers, turn_name="turn1", begin_s=100.0) == ()


def test_pictures_that_the_prefill_decode_instance_encodes_have_no_stages_of_their_own() -> None:
    (found,) = request_stages(
        [step(100.2, "turn1-0")], [ask(2)], [answer(0.0)], turn_name="turn1", begin_s=100.0
    )
    assert found.kind == "pictures"
    assert list(found.ends_s) == ["reach", "prefill", "decode"]
