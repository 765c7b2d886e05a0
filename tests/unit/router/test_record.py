"""What is noted of requests, who hears of it, how long it is kept, and what is counted from it."""

from __future__ import annotations

import gc
import weakref
from typing import cast

import msgspec
import pytest

from epd_portable.delivery.fallbacks import RequestPhase
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.observability.record import (
    MAX_PAIRS,
    Activity,
    FallbackUse,
    ItemRecord,
    Leg,
    Listener,
    RecentRequests,
    RequestRecord,
    Step,
    Traffic,
)
from epd_portable.wire.outcomes import FailureKind
from epd_portable.wire.params import ItemOutcome

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
    requests = RecentRequests([heard])
    record = RequestRecord("r", CHAT)
    requests.start(record)
    assert list(requests.in_flight) == [record]
    picture = item("a", pixels=12)
    record.note_items([picture])
    with record.leg("answer", "pd-0"):
        job = record.job(picture, "encode-0", 100)
        record.end_job(picture, job, "timeout")
        record.fall_back(RequestPhase.ENCODE, FailureKind.TIMEOUT)
        record.end_item(picture, "local")
    requests.finish(record)
    assert heard.words == [
        "begun",
        "answer by pd-0 of None",
        "encode by encode-0 of 100",
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


def test_a_try_that_raises_has_failed_and_the_next_one_answers() -> None:
    record = RequestRecord("r", CHAT)
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
    record = RequestRecord("r", CHAT)
    record.note_items([item("a"), item("b")])
    job = record.job(item("b"), "encode-0", 5)
    record.rename([item("b")], [item("b-media")])
    record.end_job(item("b"), job, "cancelled")
    record.end_item(item("b-media"), "encoded")
    assert [(each.end, len(each.jobs)) for each in record.items] == [("", 0), ("encoded", 1)]


class Body:
    """Stands for a picture of a client."""


def test_only_the_last_ones_are_kept_and_nothing_of_what_they_sent() -> None:
    requests = RecentRequests(kept=3)
    raw = Body()
    sent = weakref.ref(raw)
    for number in range(5):
        record = RequestRecord(str(number), CHAT)
        requests.start(record)
        part = {"image_url": cast(msgspec.Raw, raw)}
        record.note_items([MediaItem(item_uuid=str(number), modality="image", part=part)])
        requests.finish(record)
    assert [each.id for each in requests.ended] == ["2", "3", "4"]
    del raw, part
    gc.collect()
    assert sent() is None


def test_times_are_said_by_the_clock_on_the_wall() -> None:
    assert RequestRecord("r", CHAT, began_s=1000.0, began_at=10.0).wall_s(12.5) == 1002.5


# Activity.


def went(activity: Activity) -> list[tuple[str, str, str, int]]:
    return [(pair.source, pair.target, pair.cargo, pair.count) for pair in activity.pairs]


def test_a_pair_has_items_the_bytes_that_answers_reported_and_prompts_apart() -> None:
    activity = Activity()
    activity.delivered("e", "pd")
    activity.delivered("e", "pd")
    came = ItemOutcome(mm_hash="a", source="transfer", encoder="e", path="shm", nbytes=100)
    activity.had("pd", came)
    for source in ("encoder_cache", "local"):
        activity.had("other", ItemOutcome(mm_hash="a", source=source))
    items = Traffic(
        source="e", target="pd", cargo="items", path="shm", count=2, reported=1, nbytes=100
    )
    assert activity.pairs == (items,)
    activity.prefilled("e", "pd")
    activity.delivered("e", "pd-1")
    activity.forget("pd-1")
    assert went(activity) == [("e", "pd", "items", 2), ("e", "pd", "kv", 1)]


def test_there_are_never_more_pairs_than_the_limit_and_the_oldest_goes() -> None:
    activity = Activity()
    for number in range(MAX_PAIRS):
        activity.delivered(f"e-{number}", "pd")
    activity.delivered("e-0", "pd")  # used again
    activity.delivered("another", "pd")
    names = [pair.source for pair in activity.pairs]
    assert (len(names), "e-0" in names, "e-1" in names) == (MAX_PAIRS, True, False)


def test_an_item_went_to_who_was_asked_when_its_job_began() -> None:
    activity, record = Activity(), RequestRecord("r", CHAT)
    record.legs = [Leg("prefill", "p", 1.0, ended_at=4.0), Leg("answer", "d", 4.0)]
    one = ItemRecord("image", 0, end="encoded", jobs=[Leg("encode", "e", 2.0, 3.0, "encoded")])
    activity.item_ended(record, one)
    one.end = "not_needed"
    activity.item_ended(record, one)
    assert went(activity) == [("e", "p", "items", 1)]


def test_kv_went_from_who_prefilled_well_to_who_answered() -> None:
    activity, record = Activity(), RequestRecord("r", CHAT)
    record.legs = [
        Leg("prefill", "p-0", 1.0, 2.0, "failed"),
        Leg("prefill", "p-1", 2.0, 3.0, "done"),
        Leg("answer", "d", 3.0, 4.0, "done"),
    ]
    activity.ended(record)
    assert went(activity) == [("p-1", "d", "kv", 1)]


def test_a_fallback_has_the_time_at_which_it_was_used_last() -> None:
    activity, record = Activity(), RequestRecord("r", CHAT)
    for at in (5.0, 7.0):
        activity.stepped(record, Step(at, "answer", "lost", "retried"))
    assert activity.fallbacks == {"retried": FallbackUse(fallback="retried", count=2, at=7.0)}
