from __future__ import annotations

from typing import Any

import pytest

from epd_benchmarks.load.serve import Point, figures, has_images, read_points
from epd_portable.errors import ConfigError

pytest.importorskip("PIL")


def test_a_point_inherits_the_keys_of_the_one_before() -> None:
    found = read_points(["rate=2/6,share=0.5", "rate=2,images=1/4"])
    assert [point.key for point in found] == [
        "rate=2,share=0.5",
        "rate=6,share=0.5",
        "rate=2,share=0.5,images=1/4",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed=2", "unknown key 'speed'; known are rate, prompts,"),
        ("rate=0", "rate: Input should be greater than 0"),
        ("rate=2/2", "rate=2 is duplicate"),
    ],
)
def test_an_invalid_point_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_points([text])


def test_rounds_have_exact_shares_and_different_requests() -> None:
    point = Point(rate=5.0, share=0.3, images=(2,), size=(28,), text=5)
    lines = point.lines(4.0, 0)
    assert (len(lines), sum(map(has_images, lines))) == (20, 6)
    assert {len(line["content"]) for line in lines if has_images(line)} == {3}
    assert point.lines(4.0, 0) == lines
    texts = {line["content"][-1]["text"] for line in (*lines, *point.lines(4.0, 1))}
    assert len(texts) == 40
    assert len(Point(prompts=7, share=0.0).lines(60.0, 0)) == 7


def result(**changes: Any) -> dict[str, Any]:
    """A result of ``vllm bench serve --save-detailed`` of two requests."""
    return {
        "errors": ["", ""],
        "output_lens": [3, 2],
        "ttfts": [0.1, 0.5],
        "itls": [[0.02, 0.04], [0.3]],
        "duration": 2.0,
        "request_throughput": 1.0,
        "request_goodput": None,
        "output_throughput": 2.5,
        "completed": 2,
        "failed": 0,
        **changes,
    }


def test_figures_are_divided_by_kind_of_request() -> None:
    text, image = Point(share=0.0, text=1, prompts=1), Point(share=1.0, size=(28,), prompts=1)
    lines = [*text.lines(1, 0), *image.lines(1, 0)]
    found = figures([lines, lines], [result(), result(errors=["", "Bad Gateway"])])
    assert found["requests"] == {"text": 2, "images": 2, "all": 4}
    assert (found["failed"], found["problem"]) == (1, "Bad Gateway")
    assert found["times_s"]["text"]["longest ITL"]["p50"] == 0.04
    assert found["times_s"]["text"]["TPOT"]["p50"] == 0.03
    assert found["times_s"]["images"]["E2E"]["p99"] == 0.8
    assert found["vllm"]["output_throughput"] == 5.0
