from __future__ import annotations

import base64
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from epd_portable.bench.load.clients import body_of
from epd_portable.bench.load.command import load_command
from epd_portable.bench.load.plan import (
    REPEATED,
    LoadPlan,
    LoadPoint,
    LoadRequest,
    read_points,
)
from epd_portable.bench.load.presets import PRESETS
from epd_portable.bench.load.sides import instance_count, read_sides
from epd_portable.config.load import load_topology
from epd_portable.errors import ConfigError

POINT = LoadPoint(rate=2.0)


def plan(seconds: float = 100.0) -> LoadPlan:
    return LoadPlan(points=(POINT,), seconds=seconds, rounds=1)


def requests(number: int = 0, **point: object) -> list[LoadRequest]:
    asked = LoadPoint(**{"rate": 2.0, **point})  # type: ignore[arg-type]
    return list(plan().requests(asked, number))


def seeds(found: list[LoadRequest]) -> list[str]:
    return [picture.seed for each in found for picture in each.pictures]


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = [each.at_s for each in plan(4000.0).requests(LoadPoint(rate=5.0, share=0.0), 0)]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(1, rel=0.1)
    assert min(gaps) >= 0 and times[-1] < 4000


def test_a_round_is_the_same_in_every_process_and_no_other_round_is() -> None:
    assert requests(1) == requests(1)
    assert [each.at_s for each in requests(1)] != [each.at_s for each in requests(2)]
    assert [round(each.at_s, 3) for each in requests(0)[:3]] == [0.267, 0.874, 0.895]


def test_a_mix_has_exactly_its_share_of_pictures() -> None:
    found = requests(share=0.1, pictures=(4,), size=(112, 448))
    counts = [len(each.pictures) for each in found]
    assert counts.count(4) == round(0.1 * len(found)) > 0
    assert counts.count(0) == len(found) - counts.count(4)
    assert {each.size for request in found for each in request.pictures} == {112, 448}
    found = requests(share=1.0, pictures=(1, 2, 4, 8))
    assert {len(each.pictures) for each in found} == {1, 2, 4, 8}


def test_no_text_and_no_picture_is_sent_twice_but_those_of_the_repeated_set() -> None:
    found = [*requests(1, share=1.0, pictures=(2,)), *requests(2, share=1.0, pictures=(2,))]
    assert len({each.text for each in found}) == len(found)
    assert len(set(seeds(found))) == 2 * len(found)
    first, second = (set(seeds(requests(n, share=1.0, pictures=(4,), repeat=0.5))) for n in (1, 2))
    assert len(first & second) == REPEATED


def test_the_length_of_a_text_is_given_in_tokens() -> None:
    (each, *_) = requests(share=0.0, text=400)
    [message] = json.loads(body_of(each, "m", 0.5))["messages"]
    assert len(message["content"][0]["text"].split()) == 200


def test_a_body_has_its_pictures_before_its_text_and_asks_for_a_length() -> None:
    (each, *_) = requests(share=1.0, pictures=(2,), size=(28,), text=9, output=5)
    body = json.loads(body_of(each, "some/model", 1.0))
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("some/model", 5, True)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    urls = [part["image_url"]["url"] for part in message["content"][:2]]
    assert urls[0] != urls[1]
    assert base64.b64decode(urls[0].partition(",")[2]).startswith(b"\xff\xd8")


def test_videos_are_their_frames_in_place_of_pictures() -> None:
    (point,) = read_points(["rate=2,share=1,pictures=2,size=28,frames=3,text=9,output=5"])
    assert point.key == "share=1,pictures=2,size=28,text=9,output=5,rate=2,frames=3"
    (each, *_) = plan().requests(point, 0)
    [message] = json.loads(body_of(each, "m", 1.0))["messages"]
    first, second, _ = message["content"]
    assert [first["type"], second["type"]] == ["video_url", "video_url"]
    frames = []
    for part in (first, second):
        kind, *content = part["video_url"]["url"].split(",")
        assert kind == "data:video/jpeg;base64"
        assert len(content) == 3
        frames += content
    assert len(set(frames)) == 6
    assert all(base64.b64decode(frame).startswith(b"\xff\xd8") for frame in frames)


def test_a_point_is_as_the_one_before_it_but_for_what_it_names() -> None:
    found = read_points(
        [
            "rate=2/6,share=0.3,pictures=1/4,size=112,text=9,output=8",
            "rate=1,pictures=2,repeat=0.5",
            "share=0",
            "rate=3,clients=4",
        ]
    )
    assert [point.key for point in found] == [
        "share=0.3,pictures=1/4,size=112,text=9,output=8,rate=2",
        "share=0.3,pictures=1/4,size=112,text=9,output=8,rate=6",
        "share=0.3,pictures=2,size=112,text=9,output=8,rate=1,repeat=0.5",
        "share=0,pictures=2,size=112,text=9,output=8,rate=1,repeat=0.5",
        "share=0,pictures=2,size=112,text=9,output=8,rate=3,repeat=0.5,clients=4",
    ]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["speed=1"], "'speed' is none of share"),
        (["rate=fast"], "rate: .*number"),
        (["rate=1", "rate=1"], "is there twice"),
        (["share=0.5"], "say how often to ask"),
        (["file=a.jsonl,rate=1"], "by prompts="),
        (["rate=0"], "rate: .*greater than 0"),
        (["rate=1,share=2"], "share: .*less than or equal to 1"),
        (["rate=1,output=0"], "output: .*greater than 0"),
        (["rate=1,size=9"], "size.0: .*equal to 28"),
    ],
)
def test_a_point_that_cannot_be_sent_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_points(texts)


def test_so_many_prompts_come_at_once_and_none_of_a_file_is_asked_twice(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"a cat")
    file = tmp_path / "asked.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"question {number}", "images": ["cat.png"]}) + "\n"
            for number in range(10)
        )
    )
    points = read_points([f"file={file},prompts=2/3,output=7"])
    asked = LoadPlan(points=points, seconds=1.0, rounds=2)
    found = [
        request
        for number in range(2)
        for point in points
        for request in asked.requests(point, number)
    ]
    assert [request.text for request in found] == [f"question {n}" for n in range(10)]
    assert {(each.at_s, each.output_tokens, each.kind) for each in found} == {(0.0, 7, "pictures")}
    [message] = json.loads(body_of(found[3], "demo", 1.0))["messages"]
    shown, said = message["content"]
    assert shown["image_url"]["url"] == "data:image/png;base64,YSBjYXQ="
    assert said["text"] == "question 3"
    assert points[0].key == f"output=7,prompts=2,file={file}"
    with pytest.raises(ConfigError, match="round 3 asks for lines 11 to 12"):
        asked.requests(points[0], 2)
    # Known before a side is started: none of these is there.
    command = ["--side", "there=url:http://127.0.0.1:1", "--point", f"file={file},prompts=2/3"]
    with pytest.raises(ConfigError, match="round 3 asks for lines 11 to 12"):
        load_command.main([*command, "--rounds", "3"], standalone_mode=False)
    file.write_text('{"prompt": "no images"}\n')
    with pytest.raises(ConfigError, match="in every line"):
        asked.requests(points[0], 0)
    made_up = LoadPoint(prompts=4, share=0.5)
    assert len(plan(1e-9).requests(made_up, 0)) == 4


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_options_that_can_be_read(name: str) -> None:
    preset = PRESETS[name]
    assert preset.keys() <= {option.name for option in load_command.params}
    assert len(read_points(preset["point_texts"])) >= 4
    first, *_ = sides = read_sides(preset["side_texts"])
    assert len(sides) == 2
    for side in sides:
        topology = load_topology(side.file, "cuda", overrides=side.settings) if side.file else None
        assert instance_count(side, topology) == instance_count(
            first, load_topology(first.file, "cuda") if first.file else None
        ), "equal means"
