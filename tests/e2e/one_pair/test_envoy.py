"""Envoy in front of real engines, with the router as its endpoint picker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.asking import ask, ask_streamed, assert_equal
from tests.e2e.cases import SINGLE
from tests.e2e.conftest import Pair, Split, router_of
from tests.e2e.equality import TOLERANCE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.needs_envoy,
    pytest.mark.needs_vllm,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def fronted(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("envoy")
    module = ("epd_portable.router.picker", "--folder", str(folder), "--threads", "1")
    with router_of(pair.split, folder / "picker.log", module=module, store=None) as split:
        yield split


@pytest.mark.parametrize("case", ["one picture twice", "text, picture, text, picture", "text only"])
def test_an_answer_through_envoy_is_that_of_one_process(
    fronted: Split, pair: Pair, case: str
) -> None:
    content = SINGLE[case]
    answer = ask(fronted.url, content)
    assert_equal(answer, ask(pair.reference_url, content), tolerance=TOLERANCE)
    streamed = ask_streamed(fronted.url, content)
    assert_equal(streamed, answer, tolerance=TOLERANCE)


def test_pictures_come_from_the_encoder(fronted: Split) -> None:
    """Looks back at what is above."""
    assert len(fronted.encoded_by("encode")) == 3
    assert fronted.encoded_by("prefill_decode") == []
