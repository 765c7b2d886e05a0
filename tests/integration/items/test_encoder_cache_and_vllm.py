"""Without preallocation our encoder cache gives the answers of vLLM's own.

Not among the unit tests because importing vLLM takes longer than all of them.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from epd_portable.encode.two_levels import TwoLevelCache
from epd_portable.items.encoder_cache import PrefillEncoderCache
from tests.unit.builders import encoder_cache, request

NAMES = ["cat", "dog", "emu", "fox", "gnu"]
SIZES = {name: number + 1 for number, name in enumerate(NAMES)}
ANIMALS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
"""An item twice in a prompt is held until its last place: vLLM may release it in between."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["schedule", "schedule", "schedule", "free_input", "free", "drain"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 12),
    ),
    max_size=60,
)


def vllm_manager() -> Any:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager as Original

    return Original


@settings(max_examples=300, deadline=None)
@given(requests=st.lists(ANIMALS, min_size=4, max_size=4), steps=STEPS)
def test_without_preallocation_it_answers_as_vllm_s_own_manager(
    requests: list[list[str]], steps: list[tuple[str, int, int, int]]
) -> None:
    original = vllm_manager()
    made = [
        request(f"r{number}", *((name, SIZES[name]) for name in names))
        for number, names in enumerate(requests)
    ]
    ours, theirs = encoder_cache(9), original(9)
    for action, number, item, budget in steps:
        engine_request = made[number]
        input_id = item % len(engine_request.mm_features)
        answers = []
        for cache in (ours, theirs):
            answer: object = None
            if action == "free":
                cache.free(engine_request)
            elif action == "free_input":
                cache.free_encoder_input(engine_request, input_id)
            elif action == "drain":
                answer = cache.get_freed_mm_hashes()
            elif cache.check_and_update_cache(engine_request, input_id):
                answer = "hit"
            elif cache.can_allocate(engine_request, input_id, budget, budget % 3):
                cache.allocate(engine_request, input_id)
                answer = "allocated"
            answers.append(
                (
                    answer,
                    cache.num_free_slots,
                    cache.num_freeable_slots,
                    [cache.get_cached_input_ids(each) for each in made],
                    [
                        cache.get_cached_num_encoder_embeds(each, index)
                        for each in made
                        for index in range(len(each.mm_features))
                    ],
                )
            )
        assert answers[0] == answers[1], (action, number, input_id)
    assert ours.get_freed_mm_hashes() == theirs.get_freed_mm_hashes()


@pytest.mark.parametrize("ours", [TwoLevelCache, PrefillEncoderCache])
def test_managers_have_every_method_of_vllms_manager(ours: type) -> None:
    original = vllm_manager()
    theirs = {name for name in vars(original) if not name.startswith("_")}
    assert theirs - {"create_manager"} <= set(dir(ours))
    assert encoder_cache(1).get_manager_metadata() is None
