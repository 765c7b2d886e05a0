from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.delivery.assignment import EncodeTimes, count_local_first
from epd_portable.delivery.instances import EndpointPool, Instance
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.settings import InstanceSettings

PIXELS = 448 * 448
TIME_S = 0.25
PD = InstanceSettings(
    name="pd", role="prefill-decode", url="http://pd:1", control="tcp://127.0.0.1:9"
)


def pictures(count: int, pixels: int = PIXELS) -> list[MediaItem]:
    return [
        MediaItem(item_uuid=str(number), modality="image", part={}, pixels=pixels)
        for number in range(count)
    ]


class Scene:
    """Encoders that need a quarter of a second for a picture, and one PD instance."""

    def __init__(self, encoders: int = 1) -> None:
        fleet = EndpointPool()
        self.encoders = [
            fleet.add(InstanceSettings(name=f"e{n}", role="encode", url=f"http://e{n}:1"))
            for n in range(encoders)
        ]
        self.pd = fleet.add(PD)
        self.times = EncodeTimes()
        self.times.observe(pictures(1)[0], TIME_S)
        self._running = contextlib.ExitStack()

    def has(self, instance: Instance, items: int) -> None:
        for _ in range(items):
            self._running.enter_context(instance.encoding(TIME_S))

    def computes(self) -> None:
        self._running.enter_context(self.pd.working()).compute()

    def asked(self, items: list[MediaItem], threshold: float = 4.0) -> tuple[int, str]:
        encoders = [self.encoders[n % len(self.encoders)] for n in range(len(items))]
        times_s = [self.times.of(item) for item in items]
        return count_local_first(times_s, encoders, self.pd, threshold=threshold)


def test_a_size_that_was_not_seen_is_taken_for_the_next_one() -> None:
    times = EncodeTimes()
    (seen,) = pictures(1)
    times.observe(seen, TIME_S)
    for factor in (0.5, 1, 2):
        (other,) = pictures(1, int(PIXELS * factor))
        assert times.of(other) == TIME_S
    for factor in (0.2, 5):
        (other,) = pictures(1, int(PIXELS * factor))
        assert times.of(other) == 0.0


def test_one_picture_goes_to_an_encoder_that_has_nothing_to_do() -> None:
    assert Scene().asked(pictures(1)) == (0, "idle")


@pytest.mark.parametrize(("count", "here"), [(2, 0), (3, 1), (4, 1), (8, 2)])
def test_pictures_of_one_request_are_shared_with_an_idle_instance(count: int, here: int) -> None:
    assert Scene().asked(pictures(count)) == (here, "idle")


def test_two_encoders_leave_a_third_to_the_instance() -> None:
    assert Scene(encoders=2).asked(pictures(6)) == (1, "idle")
    assert Scene(encoders=2).asked(pictures(6), threshold=1.0) == (2, "idle")


def test_a_picture_behind_a_queue_is_encoded_at_once_by_an_idle_instance() -> None:
    scene = Scene()
    scene.has(scene.encoders[0], 2)
    assert scene.asked(pictures(1)) == (1, "idle")
    # Unless that has such work, too.
    scene.has(scene.pd, 2)
    assert scene.asked(pictures(1)) == (0, "idle")


def test_an_instance_that_computes_for_others_helps_only_with_a_long_queue() -> None:
    scene = Scene()
    scene.computes()
    scene.has(scene.encoders[0], 3)
    assert scene.asked(pictures(1)) == (0, "queue")
    scene.has(scene.encoders[0], 1)
    assert scene.asked(pictures(1)) == (1, "queue")
    assert scene.asked(pictures(1), threshold=6.0) == (0, "queue")


def test_nothing_is_chosen_by_times_that_nobody_has_seen() -> None:
    scene = Scene()
    scene.has(scene.encoders[0], 10)
    assert scene.asked(pictures(4, pixels=64 * PIXELS)) == (0, "idle")


@given(count=st.integers(1, 32), encoders=st.integers(1, 4), queued=st.integers(0, 12))
def test_what_is_encoded_here_ends_before_encoders_would_have_ended(
    count: int, encoders: int, queued: int
) -> None:
    scene = Scene(encoders)
    for number in range(queued):
        scene.has(scene.encoders[number % encoders], 1)
    here, _ = scene.asked(pictures(count), threshold=1.0)
    longest = max(
        each.pending_encode_s + TIME_S * len(range(number, count, encoders))
        for number, each in enumerate(scene.encoders)
        if number < count
    )
    assert here * TIME_S < longest
    # And nothing more could have been.
    left = [len([n for n in range(here, count) if n % encoders == e]) for e in range(encoders)]
    ends = [
        each.pending_encode_s + TIME_S * n
        for each, n in zip(scene.encoders, left, strict=True)
        if n
    ]
    assert here == count or (here + 1) * TIME_S >= max(ends)


def test_times_follow_what_is_seen_by_kind() -> None:
    times, [small], [large] = EncodeTimes(), pictures(1), pictures(1, pixels=16 * PIXELS)
    for _ in range(50):
        times.observe(small, 0.1)
        times.observe(large, 1.0)
    assert times.of(small) == pytest.approx(0.1)
    assert times.of(large) == pytest.approx(1.0)
    for _ in range(50):
        times.observe(small, 0.3)
    assert times.of(small) == pytest.approx(0.3, rel=1e-3)
    assert times.of(large) == pytest.approx(1.0)
