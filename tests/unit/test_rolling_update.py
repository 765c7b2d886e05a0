"""Comparison of responses from a deployment of two releases with plain vLLM of each."""

from __future__ import annotations

import pytest

from ci.rolling_update import problems
from tests.e2e.asking import Answer

OLD, NEW = "0.30.0", "0.32.0"


def answer(token: str, *encoders: str) -> Answer:
    items = tuple({"source": "transfer", "encoder": f"encode-0@a-{each}"} for each in encoders)
    return Answer(tokens=(token,), logprobs=(-1.0,), alternatives=({},), items=items)


PLAIN = {OLD: {1: answer("old")}, NEW: {1: answer("new")}}
"""Two releases that respond differently, which shows whose response is expected."""


@pytest.mark.parametrize("release", PLAIN)
def test_image_is_compared_with_the_release_that_encoded(release: str) -> None:
    other = OLD if release == NEW else NEW
    assert [*problems({1: answer(release_token(release), release)}, PLAIN)] == []
    (line,) = problems({1: answer(release_token(other), release)}, PLAIN)
    assert line.startswith(f"request 1 differs from plain vLLM {release}: ")


@pytest.mark.parametrize("encoders", [(), (OLD, NEW)], ids=["none", "both"])
def test_other_response_is_that_of_either_release(encoders: tuple[str, ...]) -> None:
    for release in PLAIN:
        assert [*problems({1: answer(release_token(release), *encoders)}, PLAIN)] == []
    (line,) = problems({1: answer("other", *encoders)}, PLAIN)
    assert OLD in line and NEW in line


def release_token(release: str) -> str:
    return PLAIN[release][1].tokens[0]
