from __future__ import annotations

from epd_portable.router.observability.activity import (
    MAX_PAIRS,
    Activity,
    FallbackUse,
    Traffic,
)
from epd_portable.router.observability.record import ItemRecord, JobRecord, Leg, RequestRecord, Step
from epd_portable.wire.params import ItemOutcome


def transferred(encoder: str, nbytes: int, path: str = "shm") -> ItemOutcome:
    return ItemOutcome(mm_hash="a", source="transfer", encoder=encoder, path=path, nbytes=nbytes)


def test_a_pair_has_the_items_and_the_bytes_that_answers_told() -> None:
    activity = Activity()
    activity.delivered("e", "pd")
    activity.delivered("e", "pd")
    activity.had("pd", transferred("e", 100))
    assert activity.pairs == (
        Traffic(source="e", target="pd", cargo="items", path="shm", count=2, told=1, nbytes=100),
    )


def test_items_that_were_there_already_belong_to_no_pair() -> None:
    activity = Activity()
    activity.had("pd", ItemOutcome(mm_hash="a", source="encoder_cache"))
    activity.had("pd", ItemOutcome(mm_hash="a", source="local"))
    assert activity.pairs == ()


def test_kv_and_items_of_the_same_two_are_kept_apart() -> None:
    activity = Activity()
    activity.delivered("a", "b")
    activity.prefilled("a", "b")
    assert {(pair.cargo, pair.count) for pair in activity.pairs} == {("items", 1), ("kv", 1)}


def test_what_an_instance_had_to_do_with_goes_with_it() -> None:
    activity = Activity()
    activity.delivered("e", "pd-0")
    activity.delivered("e", "pd-1")
    activity.forget("pd-0")
    assert [pair.target for pair in activity.pairs] == ["pd-1"]


def test_there_are_never_more_pairs_than_the_limit_and_the_oldest_goes() -> None:
    activity = Activity()
    for number in range(MAX_PAIRS):
        activity.delivered(f"e-{number}", "pd")
    activity.delivered("e-0", "pd")  # used again
    activity.delivered("another", "pd")
    names = [pair.source for pair in activity.pairs]
    assert len(names) == MAX_PAIRS
    assert "e-0" in names
    assert "e-1" not in names


def test_an_item_went_to_who_was_asked_when_its_job_began() -> None:
    activity = Activity()
    record = RequestRecord(id="r", endpoint="/v1/chat/completions")
    record.legs = [Leg("prefill", "p", 1.0, ended_at=4.0), Leg("answer", "d", 4.0)]
    job = JobRecord("e", 2.0, ended_at=3.0, end="encoded")
    item = ItemRecord("image", 0, end="encoded", jobs=[job])
    activity.item_ended(record, item)
    item.end = "not_needed"
    activity.item_ended(record, item)
    assert [(pair.source, pair.target, pair.count) for pair in activity.pairs] == [("e", "p", 1)]


def test_kv_went_from_who_prefilled_well_to_who_answered() -> None:
    activity = Activity()
    record = RequestRecord(id="r", endpoint="/v1/chat/completions")
    record.legs = [
        Leg("prefill", "p-0", 1.0, ended_at=2.0, failed=True),
        Leg("prefill", "p-1", 2.0, ended_at=3.0),
        Leg("answer", "d", 3.0, ended_at=4.0),
    ]
    activity.ended(record)
    assert [(pair.source, pair.target, pair.cargo) for pair in activity.pairs] == [
        ("p-1", "d", "kv")
    ]


def test_a_fallback_has_the_time_at_which_it_was_used_last() -> None:
    activity = Activity()
    record = RequestRecord(id="r", endpoint="/v1/chat/completions")
    activity.stepped(record, Step(5.0, "answer", "lost", "retried"))
    activity.stepped(record, Step(7.0, "answer", "lost", "retried"))
    assert activity.fallbacks == (FallbackUse(fallback="retried", count=2, at=7.0),)
