from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from epd_portable.router.policy import choose_encoder, choose_pd, rendezvous

NAMES = ["encode-0", "encode-1", "encode-2"]
IDLE = dict.fromkeys(NAMES, 0)
loads = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), min_size=1)


def test_an_image_meets_the_same_encoder_again() -> None:
    assert len({choose_encoder("image", IDLE) for _ in range(5)}) == 1


def test_images_spread_over_idle_encoders() -> None:
    chosen = Counter(choose_encoder(f"image-{n}", IDLE) for n in range(300))
    assert set(chosen) == set(NAMES)
    assert min(chosen.values()) > 60


def test_a_busy_encoder_is_passed_over() -> None:
    favourite = choose_encoder("image", IDLE)
    assert favourite is not None
    assert choose_encoder("image", {**IDLE, favourite: 4}) != favourite


def test_when_an_encoder_leaves_only_its_own_images_move() -> None:
    for n in range(100):
        first, *others = rendezvous(f"image-{n}", NAMES)
        for gone in others:
            assert rendezvous(f"image-{n}", set(NAMES) - {gone})[0] == first


@given(st.text(), loads)
def test_there_is_always_an_encoder_and_it_is_never_the_busiest_of_unequal_ones(
    key: str, load: dict[str, int]
) -> None:
    chosen = choose_encoder(key, load)
    assert chosen is not None
    average = (sum(load.values()) + 1) / len(load)
    assert load[chosen] < 1.25 * average + 1


@given(st.text(), loads)
def test_a_request_goes_where_the_least_is_in_flight(key: str, load: dict[str, int]) -> None:
    chosen = choose_pd(key, load)
    assert chosen is not None
    assert load[chosen] == min(load.values())


def test_requests_spread_over_equally_busy_instances() -> None:
    assert {choose_pd(f"request-{n}", IDLE) for n in range(50)} == set(NAMES)


def test_without_instances_nothing_is_chosen() -> None:
    assert choose_encoder("image", {}) is None
    assert choose_pd("request", {}) is None
