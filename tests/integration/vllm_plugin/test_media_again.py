"""An item that is encoded again, of a request whose worker no longer has the item's media."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.side import Side, media


def preempt(side: Side) -> None:
    side.engine.reset_prefix_cache(running=True)


def roll_back(side: Side) -> None:
    side.roll_back("r")


@pytest.mark.parametrize("second", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize("covered", [False, True], ids=["computed", "prefix hit"])
@pytest.mark.parametrize("again", [preempt, roll_back])
def test_item_is_encoded_again_from_its_media(
    again: Callable[[Side], None], covered: bool, second: bool
) -> None:
    side = Side(items={"x": 6, "y": 6}, cache=8, second=second)
    if covered:
        side.ask("before", 1, media("x"), 5)
        side.until_ended("before", within_s=5.0)
    side.ask("r", 1, media("x"), 5, answer=40)
    side.until(lambda: side.computed("r") > 12, within_s=5.0)
    side.ask("other", 1, media("y"), 1)  # Takes the space of x.
    side.until_ended("other", within_s=5.0)
    encoded = side.worker.seen["items encoded in a step"]
    again(side)
    side.until_ended("r", within_s=10.0)
    assert side.ended["r"] == "length"
    assert side.worker.seen["items encoded in a step"] == encoded + 1
    side.close()
