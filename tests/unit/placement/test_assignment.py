from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from epd_portable.placement.assignment import (
    THRESHOLDS,
    Assignment,
    Busy,
    By,
    EncodeFailure,
    EncodeTries,
    FailureKind,
    RetryBudget,
    assign_items,
    count_local_first,
    or_own,
)
from epd_portable.placement.estimates import EncodeTimes
from epd_portable.placement.instances import EndpointPool, Instance
from tests.unit.builders import instance_settings
from tests.unit.placement.profiles.situations import Picture

PD = instance_settings("pd", "prefill-decode")
PIXELS, TIME_S = 448 * 448, 0.25
LOST, FULL, GAVE_UP = FailureKind.LOST, FailureKind.FULL, FailureKind.GAVE_UP


def pictures(*names: str, pixels: int = 0) -> list[Picture]:
    return [Picture(item_uuid=n, pixels=pixels) for n in names]


def equal(count: int, pixels: int = PIXELS) -> list[Picture]:
    return pictures(*map(str, range(count)), pixels=pixels)


class Scene:
    """Encoders, which need a quarter of a second for a picture of usual size, and a PD instance."""

    def __init__(self, encoders: int = 2) -> None:
        self.pool = EndpointPool(chance=random.Random(7))
        self.pd = self.pool.add(PD)
        self.pd.health.seen_up()
        self.encoders = [self.pool.add(instance_settings(f"e{n}")) for n in range(encoders)]
        for each in self.encoders:
            each.health.seen_up()
        self.times = EncodeTimes()
        self.times.observe(equal(1)[0], TIME_S, "any")
        self.budget = RetryBudget()
        self._running = contextlib.ExitStack()

    def choose(self, item: Picture, exclude: object) -> Instance | None:
        return self.pool.choose_encoder(item.item_uuid, exclude)  # type: ignore[arg-type]

    def assign(
        self, items: list[Picture], elastic: Busy | None = None, **settled: By
    ) -> list[Assignment[Picture]]:
        return assign_items(
            items,
            self.pd,
            self.choose,
            self.times,
            settled=settled,
            threshold=THRESHOLDS["balanced"][elastic] if elastic else None,
        )

    def has(self, instance: Instance, items: int) -> None:
        for _ in range(items):
            self._running.enter_context(instance.encoding(TIME_S))

    def first_here(self, items: list[Picture], busy: Busy = "idle") -> int:
        encoders = [self.encoders[n % len(self.encoders)] for n in range(len(items))]
        times_s = [self.times.of(item) for item in items]
        return count_local_first(times_s, times_s, encoders, self.pd, THRESHOLDS["balanced"][busy])

    def tries(self, deadline_s: float = 30.0) -> EncodeTries:
        (item,) = pictures("p")
        return EncodeTries(
            lambda exclude: self.choose(item, exclude), self.budget, deadline_s=deadline_s
        )


def failure(kind: FailureKind, full_for_s: float = 0.0) -> EncodeFailure:
    return EncodeFailure(kind=kind, reason=f"is {kind.value}", full_for_s=full_for_s)


def test_settled_items_get_no_encoder() -> None:
    found = Scene().assign(pictures("a", "b", "c", "d"), b="stored", c="local_first", d="held")
    assert [each.by for each in found] == ["encoder", "stored", "local_first", "held"]
    assert [bool(each.encoder) for each in found] == [True, False, False, False]
    assert not any(each.is_elastic for each in found)


def test_tokens_first_means_no_elastic_encoding_at_busy_instance() -> None:
    assert "queue" not in THRESHOLDS["tokens"]
    idle = [THRESHOLDS[each]["idle"] for each in ("tokens", "balanced", "images")]
    assert idle == sorted({*idle}, reverse=True) and len(idle) == 3


def test_items_without_encoder_are_encoded_where_they_are_needed() -> None:
    (found,) = Scene(encoders=0).assign(pictures("a"))
    assert (found.by, found.encoder) == ("local", None)


def test_first_items_are_encoded_locally_only_if_configured() -> None:
    scene, items = Scene(encoders=1), equal(4)
    assert {each.by for each in scene.assign(items)} == {"encoder"}
    found = scene.assign(items, elastic="idle")
    assert [(each.by, each.is_elastic) for each in found[:1]] == [("local_first", True)]
    assert found[-1].by == "encoder" and not found[-1].is_elastic


# Encoders, the deadline, whether retries are left. Then failures of the encoder that was next, at
# first ``e0``: kind, seconds for which it is full, time; then seconds to wait, and who is next.
TRIES: dict[str, tuple[int, float, bool, list[tuple[Any, ...]], str]] = {
    "each fails once": (
        3, 30.0, True, [(LOST, 0, 1, 0, "e2"), (LOST, 0, 2, 0, "")],
        "encoders tried: e0, e2; last: is lost",
    ),
    "each gives it up twice": (
        2, 30.0, True,
        [(GAVE_UP, 0, 1, 0, "e1"), (GAVE_UP, 0, 1, 0, "e0"), (GAVE_UP, 0, 1, 0, "e1"),
         (GAVE_UP, 0, 1, 0, "")],
        "",
    ),
    "fails at the deadline": (2, 30.0, True, [(LOST, 0, 30, 0, "")], ""),
    "full after the deadline": (2, 30.0, True, [(FULL, 1, 31, 0, "")], ""),
    "full beyond the deadline": (1, 5.0, True, [(FULL, 60, 1, 0, "")], ""),
    # The first one has space after five seconds, then the other may have some. A failure needs a
    # retry.
    "full in turn, then lost": (
        2, 30.0, False,
        [(FULL, 5, 1, 0, "e1"), (FULL, 9, 2, 4, "e0"), (FULL, 5, 6, 0, "e1"),
         (FULL, 9, 6.5, 4.5, "e0"), (LOST, 0, 12, 0, "")],
        "",
    ),
    "cut by the deadline": (
        1, 5.0, True, [(FULL, 3, 1, 3, "e0"), (FailureKind.TIMEOUT, 0, 5, 0, "")],
        "encoders full: e0; last: is full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("history", TRIES)
def test_next_encoder_after(history: str) -> None:
    encoders, deadline_s, may_retry, failures, described = TRIES[history]
    scene = Scene(encoders)
    while not may_retry and scene.budget.spend():
        pass
    tries, encoder = scene.tries(deadline_s), "e0"
    for kind, full_for_s, now_s, wait_s, expected in failures:
        found = tries.note_failure(encoder, failure(kind, full_for_s), now_s)
        following = tries.next_encoder()
        encoder = following.name if following else ""
        assert (found, encoder) == (pytest.approx(wait_s), expected)
    assert described in tries.describe()


def test_retries_are_a_part_of_what_comes() -> None:
    budget = RetryBudget()
    at_once = sum(budget.spend() for _ in range(1000))
    for _ in range(1000):
        budget.count_request()
    later = sum(budget.spend() for _ in range(1000))
    assert (at_once, later) == (100, 100)
    for _ in range(10):
        budget.count_request()
    assert sum(budget.spend() for _ in range(10)) == 2


def sharing(scene: Scene, items: list[Picture]) -> list[Assignment[Picture]]:
    """Assign items to an instance that is an encoder itself."""
    choose = or_own(scene.pd, scene.choose)
    return assign_items(items, scene.pd, choose, scene.times, settled={})


@pytest.mark.parametrize("encoders", [0, 1, 2])
def test_encoding_engine_shares_items_with_equally_idle_ones(encoders: int) -> None:
    scene = Scene(encoders)
    found = sharing(scene, pictures(*map(str, range(6))))
    here = [each for each in found if each.by == "local_first"]
    assert len(here) == 6 // (1 + encoders) and not any(each.is_elastic for each in here)
    assert found[0].by == "local_first", "what is needed first is not transferred"
    assert not any(each.load for each in scene.pool.all)


def test_encoding_engine_passes_items_only_to_less_busy_ones() -> None:
    scene = Scene(1)
    (encoder,) = scene.encoders
    (own,) = sharing(scene, pictures("a"))
    assert own.by == "local_first"
    with scene.pd.in_flight():
        (other,) = sharing(scene, pictures("a"))
        assert other.encoder is encoder
        with encoder.in_flight():
            (own,) = sharing(scene, pictures("a"))
            assert own.by == "local_first"


def test_instance_with_two_stages_joins_and_leaves_both() -> None:
    pool = EndpointPool()
    both = pool.add(instance_settings("both", "encode-prefill-decode"))
    both.health.seen_up()
    assert pool.choose_encoder("a") is both is pool.choose_least_loaded()
    assert pool.of_duty("encode") == [both] == pool.of_duty("decode")
    with both.in_flight():
        assert pool.choose_encoder("a") is both
    pool.remove("both")
    assert pool.choose_encoder("a") is None is pool.choose_least_loaded()


# Elastic encoding.


def test_a_size_that_was_not_seen_is_taken_for_the_next_one() -> None:
    times = Scene().times
    for factor, expected_s in ((0.5, TIME_S), (1, TIME_S), (2, TIME_S), (0.2, 0.0), (5, 0.0)):
        assert times.of(equal(1, int(PIXELS * factor))[0]) == expected_s


@pytest.mark.parametrize(
    ("encoders", "queued", "own", "items", "busy", "here"),
    [
        (1, 0, 0, equal(1), "idle", 0),
        (1, 0, 0, equal(2), "idle", 0),
        (1, 0, 0, equal(3), "idle", 1),
        (1, 0, 0, equal(4), "idle", 1),
        (1, 0, 0, equal(8), "idle", 2),
        (2, 0, 0, equal(6), "idle", 1),
        (1, 2, 0, equal(1), "idle", 1),
        (1, 2, 2, equal(1), "idle", 0),
        (1, 3, 0, equal(1), "idle", 1),
        (1, 3, 0, equal(1), "queue", 0),
        (1, 4, 0, equal(1), "queue", 1),
        (1, 10, 0, equal(4, 64 * PIXELS), "idle", 0),  # Of no known time.
    ],
)
def test_images_are_encoded_locally_where_that_is_earlier(
    encoders: int, queued: int, own: int, items: list[Picture], busy: Busy, here: int
) -> None:
    """Images of a request, behind a queue at the first encoder and work of the instance itself."""
    scene = Scene(encoders)
    scene.has(scene.encoders[0], queued)
    scene.has(scene.pd, own)
    assert scene.first_here(items, busy) == here


def test_times_follow_what_is_seen_by_kind() -> None:
    times, [small], [large] = EncodeTimes(), equal(1), equal(1, 16 * PIXELS)
    for small_s in (0.1, 0.3):
        for _ in range(50):
            times.observe(small, small_s, "any")
            times.observe(large, 1.0, "any")
        assert times.of(small) == pytest.approx(small_s, rel=1e-3)
        assert times.of(large) == pytest.approx(1.0)


def test_item_of_slow_encoder_is_encoded_by_idle_instance() -> None:
    scene = Scene(encoders=1)
    counts = [
        count_local_first([TIME_S], [factor * TIME_S], scene.encoders, scene.pd, threshold=2.0)
        for factor in (1, 2, 3)
    ]
    assert counts == [0, 0, 1]


def test_encoder_without_a_remaining_item_delays_none() -> None:
    scene = Scene()
    idle, busy = scene.encoders
    scene.has(busy, 10)
    times, encoders = [TIME_S] * 3, [idle, busy, idle]
    assert count_local_first(times, times, encoders, scene.pd, threshold=2.0) == 2
