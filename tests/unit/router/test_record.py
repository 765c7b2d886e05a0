"""What is noted of requests, who hears of it, and how long it is kept."""

from __future__ import annotations

import gc
import weakref
from typing import cast

import msgspec
import pytest

from epd_portable.delivery.fallbacks import RequestPhase
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.observability.record import (
    ItemRecord,
    JobRecord,
    Listener,
    RecentRequests,
    RequestRecord,
    Step,
)
from epd_portable.wire.outcomes import FailureKind


class Heard(Listener):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def begun(self, record: RequestRecord) -> None:
        self.words.append("begun")

    def job_ended(self, record: RequestRecord, item: ItemRecord, job: JobRecord) -> None:
        self.words.append(f"{job.encoder} {job.end}")

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
    requests = RecentRequests([heard])
    record = RequestRecord("r", "/v1/chat/completions")
    requests.begin(record)
    assert list(requests.in_flight) == [record]
    picture = item("a", pixels=12)
    record.has([picture])
    with record.leg("answer", "pd-0"):
        job = record.job(picture, "encode-0", 100)
        record.end_job(picture, job, "timeout")
        record.fall_back(RequestPhase.ENCODE, FailureKind.TIMEOUT)
        record.end_item(picture, "local")
    requests.end(record)
    assert heard.words == [
        "begun",
        "encode-0 timeout",
        "timeout local",
        "item local",
        "ended",
    ]
    assert not requests.in_flight
    assert list(requests.ended) == [record]
    (noted,) = record.items
    assert (noted.modality, noted.pixels, noted.nbytes) == ("image", 12, 100)
    (leg,) = record.legs
    assert record.began_at <= leg.began_at <= job.began_at <= job.ended_at <= leg.ended_at
    assert leg.ended_at <= record.ended_at


def test_a_visit_that_raises_has_failed_and_the_next_one_answers() -> None:
    record = RequestRecord("r", "/v1/chat/completions")
    assert record.pd == ""
    with pytest.raises(ValueError), record.leg("answer", "pd-0"):
        raise ValueError
    with record.leg("prefill", "p-0"):
        pass
    assert record.pd == "pd-0"
    with record.leg("answer", "pd-1"):
        pass
    assert [(each.instance, each.failed) for each in record.legs] == [
        ("pd-0", True),
        ("p-0", False),
        ("pd-1", False),
    ]
    assert record.pd == "pd-1"


def test_an_item_with_a_new_name_is_the_same_and_late_news_of_the_old_name_still_count() -> None:
    record = RequestRecord("r", "/v1/chat/completions")
    record.has([item("a"), item("b")])
    job = record.job(item("b"), "encode-0", 5)
    record.rename([item("b")], [item("b-media")])
    record.end_job(item("b"), job, "cancelled")
    record.end_item(item("b-media"), "encoded")
    assert [(each.end, len(each.jobs)) for each in record.items] == [("", 0), ("encoded", 1)]


def test_only_the_last_ones_are_kept_and_nothing_of_what_they_sent() -> None:
    requests = RecentRequests(kept=3)
    raw = Body()
    sent = weakref.ref(raw)
    for number in range(5):
        record = RequestRecord(str(number), "/v1/chat/completions")
        requests.begin(record)
        part = {"image_url": cast(msgspec.Raw, raw)}
        record.has([MediaItem(item_uuid=str(number), modality="image", part=part)])
        requests.end(record)
    assert [each.id for each in requests.ended] == ["2", "3", "4"]
    del raw, part
    gc.collect()
    assert sent() is None


class Body:
    """Stands for a picture of a client."""


def test_times_are_told_by_the_clock_on_the_wall() -> None:
    record = RequestRecord("r", "/v1/chat/completions", began_s=1000.0, began_at=10.0)
    assert record.wall_s(12.5) == 1002.5
