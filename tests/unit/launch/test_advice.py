"""Advice by arithmetic, against published figures."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner

from epd_portable.errors import ConfigError
from epd_portable.launch.cli import main
from epd_portable.launch.plan.advice import Traffic, Way, ways

H200 = "encode=16,prefill=8.6,token=0.11,output=127,images=0.5"
"""Qwen2.5-VL-3B, half of the requests with an image of 1008 x 1008 pixels (benchmarks/results)."""


def best(traffic: Traffic, devices: int, name: str) -> Way:
    return next(way for way in ways(traffic, devices) if way.name == name)


def test_replicas_are_within_a_quarter_above_one_vllm_on_an_h200() -> None:
    assert 27.07 <= best(Traffic.read(H200), 1, "replicas").requests_s <= 1.25 * 27.07


def test_two_replicas_are_twice_one_engine_and_split_is_less() -> None:
    """Throughput of an engine is 21.76 requests/s, with an encode engine 32.75 (#41567)."""
    generate = 1000 / 32.75
    traffic = Traffic(encode=1000 / 21.76 - generate, prefill=generate, token=0, output=0, images=1)
    assert best(traffic, 2, "split").requests_s == pytest.approx(32.75)
    assert best(traffic, 2, "replicas").requests_s == pytest.approx(43.5, rel=0.01)


def test_split_of_equal_devices_never_exceeds_replicas() -> None:
    for encode, prefill, images, devices in itertools.product(
        (1, 16, 350), (1, 15, 100), (0.1, 1, 4), (2, 3, 8)
    ):
        traffic = Traffic(encode=encode, prefill=prefill, token=0.1, output=100, images=images)
        replicas = best(traffic, devices, "replicas").requests_s
        assert best(traffic, devices, "split").requests_s <= replicas * 1.000001


def test_remote_encoders_free_the_time_of_encoding() -> None:
    traffic = Traffic(encode=70, prefill=50, token=0.5, output=100, images=1, remote=200, rate=20)
    found = ways(traffic, 4)
    assert found[0].name == "remote"
    assert found[0].requests_s == pytest.approx(1.7 * best(traffic, 4, "replicas").requests_s)
    assert found[0].layout == "prefill_decode: 4, and 4 encode engines that join"


def test_replicas_come_first_where_no_other_way_gains_clearly() -> None:
    texts = Traffic(encode=16, prefill=9, token=0.1, output=100, images=0.01)
    assert ways(texts, 2)[0].name == "replicas"


@pytest.mark.parametrize("text", ["encode=16", "encode=x", f"{H200},speed=1", f"{H200},rate=-1"])
def test_traffic_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--advise"):
        Traffic.read(text)


def test_plan_shows_the_ways_for_its_devices() -> None:
    words = ["plan", "--hardware", "h200", "--config", "configs/1e1pd.yaml"]
    words += ["--advise", f"{H200},rate=20"]
    text = CliRunner().invoke(main, words).output
    assert "\nsplit " in text and "encode: 1, prefill_decode: 1" in text
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)["advice"]
    assert {each["name"].split()[0] for each in found} == {"replicas", "split", "overlapped"}
