from __future__ import annotations

import io
import itertools
import json

from PIL import Image

from epd_portable.bench.pictures import png
from epd_portable.bench.workload import kinds, rounds


def test_a_picture_can_be_read_and_has_the_size_asked_for() -> None:
    with Image.open(io.BytesIO(png(seed=1, size=100))) as image:
        image.load()
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (100, 100))
        assert len(image.getcolors(maxcolors=1000) or ()) == 64


def test_pictures_differ_by_seed_only() -> None:
    assert png(1, 56) == png(1, 56)
    assert png(1, 56) != png(2, 56)


def test_text_comes_first_and_text_beside_the_most_and_largest_pictures_last() -> None:
    found = kinds([1, 4], [112, 448])
    assert [kind.name for kind in found] == [
        "text",
        "1 picture, 112 px",
        "1 picture, 448 px",
        "4 pictures, 112 px",
        "4 pictures, 448 px",
        "text beside 4 × 448 px",
    ]
    assert (found[-1].images, found[-1].beside) == (0, 4)


def test_every_request_of_a_round_differs_so_that_no_cache_answers() -> None:
    (kind,) = (kind for kind in kinds([2], [56]) if kind.images == 2)
    seeds = itertools.count()
    bodies = [
        body
        for _ in range(2)
        for body in rounds(kind, concurrency=2, max_tokens=8, seeds=seeds).measured
    ]
    urls = [
        part["image_url"]["url"]
        for body in bodies
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    ]
    assert len(urls) == len(set(urls)) == 8
    assert len({json.dumps(body) for body in bodies}) == 4


def test_load_beside_texts_is_counted_and_not_measured() -> None:
    round_ = rounds(kinds([3], [56])[-1], concurrency=2, max_tokens=8, seeds=itertools.count())
    assert (len(round_.measured), len(round_.beside), round_.pictures) == (2, 2, 6)
    assert all(len(body["messages"][0]["content"]) == 1 for body in round_.measured)
