from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.bench.router import choice
from epd_portable.bench.router.measure import TimeLeft, read_sides
from epd_portable.bench.router.proxy import encode_jobs
from epd_portable.bench.router.special import many_addresses
from epd_portable.bench.router.stand import Cores
from epd_portable.errors import ConfigError, MeasurementError

ROOT = Path(__file__).resolve().parents[4]


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_the_time_left_follows_from_how_long_what_is_done_took() -> None:
    clock = Clock()
    left = TimeLeft([10.0, 20.0, 30.0], clock)
    assert str(left) == "60 s left"
    clock.now_s += 20.0
    left.step_done()
    assert left.left_s == 100.0
    assert str(left) == "2 min left"
    clock.now_s += 10.0
    left.step_done()
    assert left.left_s == 30.0
    left.step_done()
    assert str(left) == "0 s left"


def test_sides_are_folders_with_a_router() -> None:
    (own,) = read_sides([])
    assert (own.name, Path(own.path)) == ("router", ROOT)
    before, after = read_sides([f"before={ROOT}", f"after={ROOT}"])
    assert (before.name, after.name) == ("before", "after")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["before"], "expected NAME=PATH"),
        (["=x"], "expected NAME=PATH"),
        ([f"a={ROOT / 'docs'}"], "there is no epd_portable/router in"),
        ([f"a={ROOT}", f"a={ROOT}"], "the name a is taken"),
        ([f"proxy={ROOT}"], "the name proxy is taken"),
    ],
)
def test_what_is_no_side_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_sides(texts)


def test_what_is_measured_has_a_core_to_itself() -> None:
    two = Cores.share([1, 0])
    assert (two.measured, two.beside, two.both) == ({1}, {0}, {0, 1})
    assert not two.rates_of_two
    four = Cores.share([0, 1, 2, 3])
    assert (four.measured, four.beside, four.both) == ({3}, {0, 1, 2}, {2, 3})
    assert four.rates_of_two
    with pytest.raises(MeasurementError, match="one core"):
        Cores.share([0])


def test_the_proxy_sends_each_picture_alone() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    text = {"type": "text", "text": "hello"}
    body = {
        "model": "demo",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [picture, text, picture]},
        ],
    }
    jobs = encode_jobs(body)
    alone = [{"role": "user", "content": [picture]}]
    assert jobs == [
        {"model": "demo", "stream": False, "max_tokens": 1, "messages": alone} for _ in range(2)
    ]


def test_many_instances_have_an_address_each_on_the_loopback_network() -> None:
    addresses = many_addresses(600)
    assert len({each.name for each in addresses}) == len({each.host for each in addresses}) == 600
    assert all(each.host.startswith("127.") for each in addresses)
    assert [bool(each.control) for each in addresses[:2]] == [True, False]


def test_a_choice_takes_time() -> None:
    measured = choice.measure(50, 3)
    assert measured.keys() == {"encode", "prefill-decode"}
    assert all(each > 0 for each in measured.values())
