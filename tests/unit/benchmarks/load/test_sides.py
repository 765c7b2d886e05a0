from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from epd_benchmarks.load import sides
from epd_benchmarks.load.sides import instance_count, read_side, read_sides, share_out
from epd_portable.config.load import load_topology
from epd_portable.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]


def test_sides_are_read_with_or_without_a_name() -> None:
    found = read_sides(
        [
            "a.yaml",
            "new=b.yaml,transfer.path=tcp,front.port=1",
            "replicas:3",
            "up=upstream:1e1pd",
            "url:http://h:1/v1,http://h:2/",
            "replicas:1",
            "replicas:2,tuned",
            "upstream:1E1PD,tuned",
            "best=replicas:1,engine_args.seed=7,engine_args.dtype=auto",
        ]
    )
    assert [(side.name, side.kind, side.count, side.tuned) for side in found] == [
        ("ours", "topology", 0, False),
        ("new", "topology", 0, False),
        ("replicas", "replicas", 3, False),
        ("up", "upstream", 2, False),
        ("url", "url", 0, False),
        ("one", "replicas", 1, False),
        ("tuned-replicas", "replicas", 2, True),
        ("tuned-upstream", "upstream", 2, True),
        ("best", "replicas", 1, False),
    ]
    assert found[8].settings == ("engine_args.seed=7", "engine_args.dtype=auto")
    assert (found[1].file, found[1].settings) == (
        Path("b.yaml"),
        ("transfer.path=tcp", "front.port=1"),
    )
    assert found[4].urls == ("http://h:1", "http://h:2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hope", "expected NAME=WHAT"),
        ("replicas:0", "expected NAME=WHAT"),
        ("replicas:2,fast", "expected NAME=WHAT"),
        ("upstream:2E1PD", "expected NAME=WHAT"),
        ("dp:2", "expected NAME=WHAT"),
        ("url:ftp://h", "expected NAME=WHAT"),
        ("a=url:", "expected NAME=WHAT"),
    ],
)
def test_invalid_side_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_side(text)


def test_two_sides_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called ours"):
        read_sides(["a.yaml", "b.yaml"])


def test_every_side_gets_same_cores_and_rest_is_for_others() -> None:
    counts = {"ours": 4, "replicas": 2, "one": 1, "url": 0}
    found = share_out(counts, cores=range(6), devices=None)
    assert found.units == {
        "ours": [("2",), ("3",), ("4",), ("5",)],
        "replicas": [("2", "3"), ("4", "5")],
        "one": [("2", "3", "4", "5")],
    }
    assert (found.rest, found.binds_cores) == ((0, 1), True)
    assert str(found).endswith("of clients and front end: 0, 1.")
    full = share_out({"ours": 2}, cores=(0, 1), devices=None)
    assert (full.units, full.rest) == ({"ours": [("0",), ("1",)]}, (0, 1))


def test_more_instances_than_cores_share_all_of_them() -> None:
    found = share_out({"ours": 4, "one": 1, "url": 0}, cores=(0, 1), devices=None)
    assert found.units == {"ours": [("0", "1")] * 4, "one": [("0", "1")]}
    assert (found.binds_cores, found.rest) == (False, (0, 1))


def test_shared_device_counts_once_for_the_baselines() -> None:
    side = read_side("configs/1e1pd-one-device.yaml")
    whole = load_topology(ROOT / "configs/1e1pd-one-device.yaml", "cuda")
    apart = load_topology(ROOT / "configs/1e1pd.yaml", "cuda")
    assert (instance_count(side, whole), instance_count(side, apart)) == (1, 2)
    found = share_out({"ours": 2, "one": 1}, cores=(0,), devices=("4", "5"))
    assert found.units == {"ours": [("4",), ("5",)], "one": [("4", "5")]}
    assert (found.rest, found.binds_cores) == ((0,), False)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"ours": 4, "replicas": 3}, "4 cores or devices cannot be divided equally among the 3"),
        ({"ours": 5}, "5 devices are needed, of 4"),
    ],
)
def test_sides_that_would_not_be_equal_are_refused(counts: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        share_out(counts, cores=range(4), devices=("0", "1", "2", "3"))


def test_process_usage_is_read_until_its_end() -> None:
    argv = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # It has computed something by then.
        part = sides.Part(name="engine-0", pid=process.pid)
        assert sides.read_cpu_s([part])["engine-0"] > 0
        assert sides.read_memory_bytes([part])["engine-0"] > 0
        process.communicate()
    assert sides.read_cpu_s([part]) == {}


METRICS = """
epd_front_items_total{outcome="encoded",modality="image"} 3
epd_front_items_total{outcome="encoded",modality="audio"} 1
epd_front_items_total{outcome="local"} 2
epd_pd_fallbacks_total 5
other_total 9
"""


def test_counters_are_summed_over_other_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(url: str, **options: object) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, text=METRICS, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    parts = [
        sides.Part(name=name, pid=1, metrics_url=url)
        for name, url in (("a", "http://h/metrics"), ("b", ""), ("c", "http://h/metrics"))
    ]
    found = sides.read_counters(parts)
    assert found == {"encoded": 4, "local": 2, "encoded without a transfer": 5}
    assert sides.untransferred(found) == 7
    assert asked == ["http://h/metrics"]
