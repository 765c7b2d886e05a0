from __future__ import annotations

import base64
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from epd_portable.bench.load.answers import read
from epd_portable.bench.load.bodies import body_of, request_parts
from epd_portable.bench.load.commands import Ask, PictureSpec
from epd_portable.bench.load.requests import (
    AT_ONCE,
    REPEATED,
    Mix,
    asks_of_mix,
    asks_of_trace,
    read_trace,
)
from epd_portable.bench.load.schedule import arrivals, seed_of
from epd_portable.errors import ConfigError

TIMES = tuple(float(second) for second in range(100))


def mixed(mix: Mix, *, seed: int = 1, words_per_token: float = 1.0) -> tuple[Ask, ...]:
    return asks_of_mix(mix, TIMES, seed=seed, set_seed=7, words_per_token=words_per_token)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_variation(cv: float) -> None:
    times = arrivals(5.0, 4000.0, cv=cv, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-9)
    assert all(0 <= time_s < 4000 for time_s in times)
    assert list(times) == sorted(times)


def test_arrivals_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    assert arrivals(5, 10, cv=1, seed=1) == arrivals(5, 10, cv=1, seed=1)
    assert arrivals(5, 10, cv=1, seed=1) != arrivals(5, 10, cv=1, seed=2)


def test_seeds_tell_parts_apart_and_are_the_same_in_every_process() -> None:
    assert seed_of("a", 1) == 17620135380412294284
    assert len({seed_of("a", 1), seed_of("a1"), seed_of("a", "1"), seed_of(1, "a")}) == 4


def test_a_mix_has_exactly_its_share_of_pictures() -> None:
    asks = mixed(Mix(share=0.1, pictures=(4,), sizes=(112, 448)))
    counts = [len(ask.pictures) for ask in asks]
    assert counts.count(4) == 10
    assert counts.count(0) == 90
    assert {each.size for ask in asks for each in ask.pictures} == {112, 448}
    assert [ask.at_s for ask in asks] == list(TIMES)
    assert {ask.kind for ask in asks} == {"text", "pictures"}


def test_the_number_of_pictures_is_one_of_those_that_are_named() -> None:
    asks = mixed(Mix(share=1.0, pictures=(1, 2, 4, 8)))
    assert {len(ask.pictures) for ask in asks} == {1, 2, 4, 8}


def test_no_text_and_no_picture_is_asked_twice() -> None:
    first, second = (mixed(Mix(share=1.0, pictures=(2,)), seed=seed) for seed in (1, 2))
    texts = [ask.seed for ask in (*first, *second)]
    pictures = [each.seed for ask in (*first, *second) for each in ask.pictures]
    assert len(set(texts)) == 200
    assert len(set(pictures)) == 400


def test_repeated_pictures_come_from_a_set_that_all_rounds_share() -> None:
    mix = Mix(share=1.0, pictures=(4,), repeat=0.5)
    contents = [
        {each.seed for ask in mixed(mix, seed=seed) for each in ask.pictures} for seed in (1, 2)
    ]
    shared = contents[0] & contents[1]
    assert len(shared) == REPEATED
    assert len(contents[0]) == pytest.approx(REPEATED + 200, abs=50)


def test_the_length_of_a_text_is_told_in_tokens() -> None:
    asks = mixed(Mix(text_tokens=400), words_per_token=0.5)
    assert {ask.words for ask in asks} == {200}


def spec(picture_format: str, seed: int = 1, size: int = 56) -> PictureSpec:
    return PictureSpec(seed=seed, size=size, format=picture_format)


def body(*pictures: PictureSpec, words: int = 5) -> dict[str, Any]:
    ask = Ask(at_s=0, seed=9, words=words, output_tokens=7, pictures=pictures)
    parts = request_parts(body_of(ask), model='m"', host="h:1", request_id="turn1-0")
    head, _, content = b"".join(parts).partition(b"\r\n\r\n")
    assert f"content-length: {len(content)}".encode() in head
    assert b"x-request-id: turn1-0" in head
    found: dict[str, Any] = json.loads(content)
    return found


def test_a_body_asks_for_equal_work_of_everybody() -> None:
    asked = body(spec("png"))
    assert asked["model"] == 'm"'
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (7, True, 0)
    assert asked["stream"] and asked["stream_options"] == {"include_usage": True}
    picture, text = asked["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert len(text["text"].split()) == 5


def test_jpeg_pictures_are_as_large_as_photographs_and_differ_by_seed() -> None:
    pytest.importorskip("PIL", reason="pictures as JPEG come with an engine's environment")
    one, other = (
        body(spec("jpeg", seed))["messages"][0]["content"][0]["image_url"]["url"] for seed in (1, 2)
    )
    data = base64.b64decode(one.removeprefix("data:image/jpeg;base64,"))
    assert data.startswith(b"\xff\xd8")
    assert len(data) > 56 * 56 / 2
    assert one != other


LINE = '{"time_s": 10.5, "text_tokens": 30, "output_tokens": 5, "sizes": [112, 448]}\n'
EARLIER = '{"time_s": 8.5, "text_tokens": 3, "output_tokens": 6, "sizes": [56], "seeds": [4]}\n'


def test_recorded_traffic_is_asked_at_its_times(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text(LINE + "\n" + EARLIER + EARLIER)
    asks = asks_of_trace(read_trace(file), seed=1, format="png", words_per_token=1.0)
    assert [ask.at_s for ask in asks] == [0.0, 0.0, 2.0]
    assert [ask.words for ask in asks] == [3, 3, 30]
    assert asks[0].pictures == asks[1].pictures
    assert asks[0].seed != asks[1].seed
    assert [each.size for each in asks[2].pictures] == [112, 448]
    assert asks[2].pictures[0].seed != asks[2].pictures[1].seed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request in it"),
        ('{"time_s": 1}', "line 1: .*text_tokens"),
        (LINE + '{"time": 1}', "line 2"),
        (LINE.replace("30", "0"), "lengths must be positive"),
        (EARLIER.replace("[4]", "[4, 5]"), "one seed for each size"),
    ],
)
def test_recorded_traffic_of_another_form_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_a_missing_file_of_traffic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_trace(tmp_path / "none.jsonl")


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
USAGE = event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


def test_an_answer_is_timed_by_its_pieces_of_text() -> None:
    pieces = [(1.0, ROLE), (1.5, token("a")), (2.0, token("b") + USAGE), (3.0, DONE)]
    found = read(pieces, output_tokens=2)
    assert found.times_s == (1.5, 2.0)
    assert (found.tokens, found.prompt_tokens, found.problem) == (2, 11, "")


def test_an_event_counts_when_its_last_byte_has_come() -> None:
    cut = token("a")
    pieces = [(1.0, cut[:20]), (2.0, cut[20:-1]), (3.0, cut[-1:] + USAGE + DONE)]
    assert read(pieces, output_tokens=2).times_s == (3.0,)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (token("a") + USAGE, "ended without"),
        (token("a") + event(error={"message": "no room"}) + DONE, "broke off: .*no room"),
        (token("a") + DONE, "0 tokens in place of 2"),
        (ROLE + USAGE + DONE, "no text"),
        (b"data: {]\n\n", "not what it should be"),
    ],
)
def test_an_answer_that_is_not_as_asked_for_has_a_problem(data: bytes, words: str) -> None:
    assert re.search(words, read([(1.0, data)], output_tokens=2).problem)


def test_turns_of_a_conversation_are_sent_with_all_before_them() -> None:
    asks = mixed(Mix(turns=3, share=0.5, text_tokens=10))
    assert [ask.at_s for ask in asks] == list(TIMES)
    first, second, third = asks[0], asks[AT_ONCE], asks[2 * AT_ONCE]
    assert first.history == ()
    assert second.history == (first.seed,)
    assert third.history == (first.seed, second.seed)
    assert first.pictures == third.pictures
    assert asks[3 * AT_ONCE].history == ()
    assert len({ask.seed for ask in asks}) == len(asks)


def test_a_conversation_grows_by_what_it_began_with() -> None:
    asks = mixed(Mix(turns=3, share=0.0, text_tokens=10))
    bodies = [json.loads(b"{" + body_of(asks[turn * AT_ONCE]))["messages"] for turn in range(3)]
    assert [[each["role"] for each in messages] for messages in bodies] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant", "user", "assistant", "user"],
    ]
    for earlier, later in pairwise(bodies):
        assert later[: len(earlier)] == earlier
