"""What is noted of requests, and who hears of it."""

from __future__ import annotations

import pytest

from epd_portable.delivery.fallbacks import RequestPhase
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.observability.record import (
    ItemRecord,
    Leg,
    Listener,
    RequestRecord,
    Step,
)
from epd_portable.wire.outcomes import FailureKind

CHAT = "/v1/chat/completions"


class Heard(Listener):
    """Remembers what happened."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def begun(self, record: RequestRecord) -> None:
        self.words.append("begun")

    def leg_began(self, record: RequestRecord, leg: Leg, item: ItemRecord | None) -> None:
        self.words.append(f"{leg.stage} by {leg.instance} of {item.nbytes if item else None}")

    def job_ended(self, record: RequestRecord, leg: Leg, item: ItemRecord) -> None:
        self.words.append(f"{leg.instance} {leg.end}")

    def item_ended(self, record: RequestRecord, item: ItemRecord) -> None:
        self.words.append(f"item {item.end}")

    def stepped(self, record: RequestRecord, step: Step) -> None:
        self.words.append(f"{step.failure} {step.fallback}")

    def ended(self, record: RequestRecord) -> None:
        self.words.append("ended")


def item(name: str, **fields: int) -> MediaItem:
    return MediaItem(item_uuid=name, modality="image", part={}, **fields)


def test_listeners_hear_of_everything_in_its_order() -> None:
    heard = Heard()
    record = RequestRecord("r", CHAT)
    record.start([heard])
    picture = item("a", pixels=12)
    record.note_items([picture])
    with record.leg("answer", "pd-0"):
        job = record.job(picture, "encode-0", 100)
        record.end_job(picture, job, "timeout")
        record.fall_back(RequestPhase.ENCODE, FailureKind.TIMEOUT)
        record.end_item(picture, "local")
    record.finish()
    assert heard.words == [
        "begun",
        "answer by pd-0 of None",
        "encode by encode-0 of 100",
        "encode-0 timeout",
        "timeout local",
        "item local",
        "ended",
    ]
    (noted,) = record.items
    assert (noted.modality, noted.pixels, noted.nbytes) == ("image", 12, 100)
    (leg,) = record.legs
    assert record.began_at <= leg.began_at <= job.began_at <= job.ended_at <= leg.ended_at
    assert leg.ended_at <= record.ended_at


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
