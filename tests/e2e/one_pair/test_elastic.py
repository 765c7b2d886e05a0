"""What a PD instance encodes by choice, and what encoders bring, together are one prompt."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.asking import ask, assert_equal, picture, text
from tests.e2e.conftest import Pair
from tests.e2e.equality import TOLERANCE

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(900)]

ASK = text("What is in the pictures?")


@pytest.fixture(scope="module")
def router() -> dict[str, object]:
    return {"elastic_encode": True, "elastic_threshold": 1.0}


def test_the_first_pictures_are_encoded_here_and_the_last_ones_come(pair: Pair) -> None:
    # Of this size none has been seen: it goes to the encoder.
    assert ask(pair.split.url, [picture(900), ASK]).sources == ["transfer"]
    content = [*(picture(each) for each in range(901, 905)), ASK]
    answer = ask(pair.split.url, content)
    here = answer.sources.count("local")
    assert answer.sources == ["local"] * here + ["transfer"] * (4 - here)
    assert 1 <= here <= 3
    assert_equal(answer, ask(pair.reference_url, content), tolerance=TOLERANCE)
    counted = httpx.get(f"{pair.split.url}/metrics").text
    assert f'epd_router_elastic_items_total{{reason="idle"}} {here}.0' in counted
