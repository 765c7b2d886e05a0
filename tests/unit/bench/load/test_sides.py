from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from epd_portable.bench.load import usage
from epd_portable.bench.load.sides import (
    LoadSide,
    api_cores,
    describe,
    instance_count,
    read_side,
    read_sides,
    share_out,
)
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
    found = read_sides(texts, stand_in=False)
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


def sides_of(*texts: str) -> tuple[LoadSide, ...]:
    return read_sides(texts, stand_in=False)


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
    texts = ["a.yaml", "replicas:2", "upstream:1E1PD", "upstream:1E1PD,tuned"]
    names = [side.name for side in read_sides(texts, stand_in=True)]
    assert names == ["ours", "replicas", "upstream-stand-in", "tuned-upstream-stand-in"]
    assert all("stand-in" not in side.name for side in sides_of(*texts))


def test_two_sides_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called ours"):
        read_sides(["a.yaml", "b.yaml"], stand_in=False)


def test_every_side_gets_the_same_cores_and_the_rest_is_for_the_others() -> None:
    counts = {"ours": 4, "replicas": 2, "one": 1, "url": 0}
    found = share_out(counts, cores=range(6), devices=None)
    assert found.units == {
        "ours": [("2",), ("3",), ("4",), ("5",)],
        "replicas": [("2", "3"), ("4", "5")],
        "one": [("2", "3", "4", "5")],
    }
    assert (found.rest, found.shared) == ((0, 1), False)
    assert describe(found, devices=False).startswith("Every side has the same 4 cores (")


def test_ranks_have_as_many_seats_as_replicas() -> None:
    sides = read_sides(["replicas:2", "dp:2", "upstream:1E1PD", "replicas:1"], stand_in=False)
    assert [instance_count(side, None) for side in sides] == [2, 2, 2, 1]


def test_api_servers_of_tuned_peers_run_where_the_launcher_lets_those_of_its_instances() -> None:
    sides = read_sides(
        ["upstream:1E1PD", "upstream:1E1PD,tuned", "replicas:2,tuned", "dp:2,tuned"], stand_in=False
    )
    counts = {side.name: instance_count(side, None) for side in sides}

    def more(cores: range) -> list[list[set[int]]]:
        allotment = share_out(counts, cores=cores, devices=None)
        return [[set(api_cores(side, at, allotment)) for at in (0, 1)] for side in sides]

    # On two cores only the encoder's is not full of steps.
    assert more(range(2)) == [[set(), set()], [set(), {0}], [set(), set()], [set(), set()]]
    assert more(range(3)) == [[set(), set()], [{0}, {0, 1}], [{0}, {0}], [{0}, {0}]]


def test_with_no_core_left_the_clients_share_those_of_the_instances() -> None:
    found = share_out({"ours": 2}, cores=(0, 1), devices=None)
    assert (found.units, found.rest, found.shared) == ({"ours": [("0",), ("1",)]}, (0, 1), True)


def test_with_more_instances_than_cores_all_share_all_and_only_counts_compare() -> None:
    counts = {"ours": 4, "one": 1, "url": 0}
    found = share_out(counts, cores=(0, 1), devices=None)
    assert found.units == {"ours": [("0", "1")] * 4, "one": [("0", "1")]}
    assert found.crowded and found.rest == (0, 1)
    assert "times cannot" in describe(found, devices=False)


def test_devices_are_shared_out_in_the_same_way_and_cores_stay_free() -> None:
    found = share_out({"ours": 2, "one": 1}, cores=(0,), devices=("4", "5"))
    assert found.units == {"ours": [("4",), ("5",)], "one": [("4", "5")]}
    assert found.rest == (0,)


def test_instances_that_share_a_device_have_one_seat_and_peers_get_as_many_devices() -> None:
    (shared, peer) = read_sides(
        ["shared=configs/1e1pd-one-device.yaml", "replicas:1"], stand_in=False
    )
    whole = load_topology(ROOT / "configs/1e1pd-one-device.yaml", "cuda")
    apart = load_topology(ROOT / "configs/1e1pd.yaml", "cuda")
    counts = {"shared": instance_count(shared, whole), "replicas": instance_count(peer, whole)}
    assert counts == {"shared": 1, "replicas": 1}
    assert instance_count(shared, apart) == 2
    found = share_out(counts, cores=(0,), devices=("0",))
    assert found.units == {"shared": [("0",)], "replicas": [("0",)]}


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"ours": 4, "replicas": 3}, "4 devices cannot be divided equally among the 3"),
        ({"ours": 5}, "a side wants 5 devices and there are 4"),
    ],
)
def test_sides_that_would_not_be_equal_are_refused(counts: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        share_out(counts, cores=range(4), devices=("0", "1", "2", "3"))


def test_a_process_outside_its_cores_is_found() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: nothing is outside")
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        part = usage.Part(name="engine-0", pid=process.pid, cores=frozenset(cores[:1]))
        with pytest.raises(MeasurementError, match="engine-0: a thread of process"):
            usage.check_cores([part])
        os.sched_setaffinity(process.pid, cores[:1])
        usage.check_cores([part])
        assert usage.read_cpu_s([part])["engine-0"]["engine-0"] > 0
        assert usage.read_memory([part])["engine-0"].pss_bytes > 0
        process.communicate()
    assert usage.read_cpu_s([part]) == {"engine-0": {}}


def test_cpu_time_is_counted_since_a_reading() -> None:
    before = {"a": {"x": 1.0, "gone": 5.0}}
    after = {"a": {"x": 3.0}, "new": {"y": 2.0}}
    assert usage.cpu_s_since(after, before) == {"a": {"x": 2.0}, "new": {"y": 2.0}}


def test_what_was_counted_since_a_reading_leaves_out_what_did_not_happen() -> None:
    before = {"items encoded": 4.0, "items local": 1.0, "prefix hits": 4.0}
    after = {"items encoded": 6.0, "items local": 1.0, "prefix hits": 9.0, "fallback local": 2.0}
    assert usage.counted_since(after, before) == {
        "items encoded": 2,
        "prefix hits": 5,
        "fallback local": 2,
    }


METRICS = """
epd_router_items_total{outcome="encoded",modality="image"} 3
epd_router_items_total{outcome="encoded",modality="audio"} 1
epd_encode_transfers_total{source="encoder"} 5
vllm:prefix_cache_hits_total{engine="0"} 7
vllm:prefix_cache_hits_total{engine="1"} 2
other_total 9
"""


def test_counters_of_a_side_are_summed_over_labels_that_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def get(url: str, **options: object) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, text=METRICS, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    parts = [
        usage.Part(name=name, pid=1, metrics_url=url)
        for name, url in (("a", "http://h/metrics"), ("b", ""), ("c", "http://h/metrics"))
    ]
    assert usage.read_counters(parts) == {
        "items encoded": 4,
        "encoded encoder": 5,
        "prefix hits": 9,
    }
    assert asked == ["http://h/metrics"]
