"""Items that nobody asks for: what the router takes back, and what it never signed."""

from __future__ import annotations

from typing import Literal

import pytest

from epd_portable.connector import consumer
from epd_portable.wire.messages import NotWanted
from tests.unit.runners.harness import (
    CAT,
    Pair,
    PrefillSide,
    assert_everything_is_back,
    sources,
)

Kind = Literal["sync", "async"]


def not_wanted(pair: Pair, transfer_id: str) -> None:
    pair.pd.mailbox.inbox.append((b"router", NotWanted(transfer_id=transfer_id)))


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("announced", ["before", "after"])
def test_an_encoder_hears_at_once_that_nobody_wants_its_item(kind: Kind, announced: str) -> None:
    """Its output keeps room in its cache until then."""
    pair = Pair(PrefillSide(preallocation=kind))
    if announced == "before":
        pair.encode.submit(CAT)
        pair.round()
    not_wanted(pair, "t-cat")
    pair.round()
    if announced == "after":
        pair.encode.submit(CAT)
    pair.settle()
    assert pair.encode.ended == ["t-cat"]
    assert not pair.encode.writes
    assert_everything_is_back(pair.pd)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_announcement_that_the_router_has_not_signed_changes_nothing(kind: Kind) -> None:
    pair = Pair(PrefillSide(preallocation=kind))
    pair.pd.mailbox.forged.add("t-cat")
    pair.encode.submit(CAT, ready=True)
    pair.settle()
    assert not pair.pd.cache.items
    assert not pair.encode.ended
    assert not pair.pd.receiver._session._early
    pair.pd.arrive("r", CAT)
    pair.pd.clock.now += 1.1  # It is announced again.
    pair.settle()
    assert sources(pair.pd, "r") == {"cat": "transfer"}, "a request names it, which is proof enough"


def test_announcements_that_nobody_asks_for_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "MAX_EARLY", 1)
    pair = Pair()
    pair.encode.submit(CAT)
    pair.settle()
    assert len(pair.pd.receiver._session._early) == 1
    pair.pd.clock.now += 30.0
    pair.settle()
    assert not pair.pd.receiver._session._early
