"""Items on a prefill+decode side: every request ends, and nothing that it had is lost."""

from __future__ import annotations

import pytest

from tests.kit.side import Side, bare, media

pytestmark = pytest.mark.needs_vllm


def test_first_item_gets_room_that_another_request_waits_for() -> None:
    side = Side(
        items={"x1": 8, "x2": 6, "y": 5}, cache=9, pool=11, seats=2, blocks=28, block=4, tokens=16
    )
    encoder = side.encoder()
    side.ask("before", 1, media("x1"), 3)
    side.until_ended("before", within_s=5.0)
    side.ask("running", 2, bare("y"), 2, answer=40, transfers={"y": "t-running"})
    side.turns()
    side.ask("A", 1, media("x1"), 3, media("x2"), 1)  # Its prefix covers x1.
    side.turns()
    side.ask("text", 3, answer=50)  # Has the other seat.
    side.turns()
    side.ask("B", 2, bare("x2"), 1, transfers={"x2": "t-B"})
    side.turns(2)
    side.encode(encoder, "t-running", "y")
    side.until_ended("text", "running", within_s=30.0)  # Their KV takes the place of the prefix.
    side.ask("C", 4)
    side.ask("D", media("x1"), 1)
    side.until_ended("A", "B", "C", "D", within_s=10.0)
    side.close()
