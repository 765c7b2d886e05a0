"""What is noted of requests, and who hears of it."""

from __future__ import annotations

import pytest

from epd_portable.router.contents.media import MediaItem
from epd_portable.router.observability.record import RequestRecord

CHAT = "/v1/chat/completions"


def item(name: str, **fields: int) -> MediaItem:
    return MediaItem(item_uuid=name, modality="image", part={}, **fields)


def test_a_try_that_raises_has_failed_and_the_next_one_answers() -> None:
    record = RequestRecord("r", CHAT)
    with pytest.raises(ValueError), record.leg("answer", "pd-0"):
        raise ValueError
    with record.leg("prefill", "p-0"):
        pass
    with record.leg("answer", "pd-1"):
        pass
    assert [(each.instance, each.failed) for each in record.legs] == [
        ("pd-0", True),
        ("p-0", False),
        ("pd-1", False),
    ]


def test_an_item_with_a_new_name_is_the_same_and_late_news_of_the_old_name_still_count() -> None:
    record = RequestRecord("r", CHAT)
    record.note_items([item("a"), item("b")])
    job = record.job(item("b"), "encode-0", 5)
    record.rename([item("b")], [item("b-media")])
    record.end_job(item("b"), job, "cancelled")
    record.end_item(item("b-media"), "encoded")
    assert [(each.end, len(each.jobs)) for each in record.items] == [("", 0), ("encoded", 1)]


def test_times_are_said_by_the_clock_on_the_wall() -> None:
    assert RequestRecord("r", CHAT, began_s=1000.0, began_at=10.0).wall_s(12.5) == 1002.5
