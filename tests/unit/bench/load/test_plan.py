from __future__ import annotations

import base64
import json
import statistics
from itertools import pairwise

import pytest

from epd_portable.bench.load.bodies import body_of
from epd_portable.bench.load.plan import (
    CONVERSATIONS,
    REPEATED,
    LoadPlan,
    LoadPoint,
    LoadRequest,
    read_points,
)
from epd_portable.errors import ConfigError

POINT = LoadPoint(rate=2.0)


def plan(*points: LoadPoint, seconds: float = 100.0, rounds: int = 0) -> LoadPlan:
    return LoadPlan(points=points or (POINT,), seconds=seconds, rounds=rounds)


def requests(number: int = 0, words_per_token: float = 1.0, **point: object) -> list[LoadRequest]:
    asked = LoadPoint(**{"rate": 2.0, **point})  # type: ignore[arg-type]
    return list(plan(asked).requests(asked, number, words_per_token))


def test_arrivals_are_those_of_a_poisson_process() -> None:
    point = LoadPoint(rate=5.0, share=0.0)
    times = [each.at_s for each in plan(seconds=4000.0).requests(point, 0)]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(1, rel=0.1)
    assert all(0 <= time_s < 4000 for time_s in times)
    assert times == sorted(times)


def test_a_round_is_the_same_in_every_process_and_no_other_round_is() -> None:
    assert requests(1) == requests(1)
    assert [each.at_s for each in requests(1)] != [each.at_s for each in requests(2)]
    assert [round(each.at_s, 3) for each in requests(0)[:3]] == FIRST_S


FIRST_S = [0.503, 0.779, 2.038]


def test_a_mix_has_exactly_its_share_of_pictures() -> None:
    found = requests(share=0.1, pictures=(4,), size=(112, 448))
    counts = [len(each.pictures) for each in found]
    assert counts.count(4) == round(0.1 * len(found)) > 0
    assert counts.count(0) == len(found) - counts.count(4)
    assert {each.size for request in found for each in request.pictures} == {112, 448}
    assert {each.kind for each in found} == {"text", "pictures"}


def test_the_number_of_pictures_is_one_of_those_that_are_named() -> None:
    found = requests(share=1.0, pictures=(1, 2, 4, 8))
    assert {len(each.pictures) for each in found} == {1, 2, 4, 8}


def test_no_text_and_no_picture_is_sent_twice() -> None:
    found = [*requests(1, share=1.0, pictures=(2,)), *requests(2, share=1.0, pictures=(2,))]
    texts = [each.texts for each in found]
    pictures = [picture.seed for each in found for picture in each.pictures]
    assert len(set(texts)) == len(texts)
    assert len(set(pictures)) == len(pictures) == 2 * len(texts)


def test_repeated_pictures_come_from_a_set_that_all_rounds_share() -> None:
    contents = [
        {
            picture.seed
            for each in requests(number, share=1.0, pictures=(4,), repeat=0.5)
            for picture in each.pictures
        }
        for number in (1, 2)
    ]
    assert len(contents[0] & contents[1]) == REPEATED


def test_the_length_of_a_text_is_given_in_tokens() -> None:
    assert {each.words for each in requests(words_per_token=0.5, text=400)} == {200}


def test_turns_of_a_conversation_are_sent_with_all_before_them() -> None:
    found = requests(turns=3, share=0.5, text=10)
    first, second, third = found[0], found[CONVERSATIONS], found[2 * CONVERSATIONS]
    assert len(first.texts) == 1
    assert second.texts[:-1] == first.texts
    assert third.texts[:-1] == second.texts
    assert first.pictures == third.pictures
    assert len(found[3 * CONVERSATIONS].texts) == 1
    assert len({each.texts for each in found}) == len(found)


def test_a_conversation_grows_by_what_it_began_with() -> None:
    found = requests(turns=3, share=0.0, text=10)
    bodies = [json.loads(body_of(found[turn * CONVERSATIONS], "m"))["messages"] for turn in (0, 1)]
    assert [[each["role"] for each in messages] for messages in bodies] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert bodies[1][:1] == bodies[0]


def test_a_body_has_its_pictures_before_its_text_and_asks_for_a_length() -> None:
    (each, *_) = requests(share=1.0, pictures=(2,), size=(28,), text=9, output=5)
    body = json.loads(body_of(each, "some/model"))
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("some/model", 5, True)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    urls = [part["image_url"]["url"] for part in message["content"][:2]]
    assert urls[0] != urls[1]
    assert base64.b64decode(urls[0].partition(",")[2]).startswith(b"\xff\xd8")


def test_rounds_are_planned_until_30_requests_with_pictures_are_behind_each_figure() -> None:
    whole = plan(seconds=15.0)
    count = whole.rounds_of(POINT)
    assert sum(whole.pictures_in(POINT, number) for number in range(count)) >= 30
    assert sum(whole.pictures_in(POINT, number) for number in range(count - 1)) < 30
    often, texts = LoadPoint(rate=50.0, share=0.5), LoadPoint(rate=2.0, share=0.0)
    assert (whole.rounds_of(often), whole.rounds_of(texts)) == (3, 3)
    assert plan(rounds=2).rounds_of(POINT) == 2


def test_a_point_is_as_the_one_before_it_but_for_what_it_names() -> None:
    found = read_points(
        ["rate=2/6,share=0.3,pictures=1/4,size=112,text=9,output=8", "rate=1,pictures=2"]
    )
    assert [point.key for point in found] == [
        "2/s, 30% × 1/4 × 112 px, 9+8 tokens",
        "6/s, 30% × 1/4 × 112 px, 9+8 tokens",
        "1/s, 30% × 2 × 112 px, 9+8 tokens",
    ]
    (talk,) = read_points(["rate=1,share=0,turns=8"])
    assert talk.key == "1/s, text only, 8 turns, 400+150 tokens"
    (again,) = read_points(["rate=1,repeat=0.5"])
    assert again.key == "1/s, 10% × 1 × 448 px, 50% repeated, 400+150 tokens"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["speed=1"], "'speed' is none of rate"),
        (["rate=fast"], "'fast' is no value of rate"),
        (["rate=1", "rate=1"], "is there twice"),
        (["share=0.5"], "say how often to ask"),
        (["rate=0"], "a rate is positive"),
        (["rate=1,share=2"], "shares are 0 to 1"),
        (["rate=1,output=1"], "tokens of an answer 2"),
        (["rate=1,size=9"], "28 to 4096"),
    ],
)
def test_a_point_that_cannot_be_sent_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_points(texts)
