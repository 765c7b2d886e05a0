from __future__ import annotations

import pytest

from epd_portable.encode.two_levels import TwoLevelCache
from tests.unit.builders import FakeRequest, encoder_cache, request


def encode(cache: TwoLevelCache, engine_request: FakeRequest, input_id: int = 0) -> bool:
    """Encode an item here, as vLLM's scheduler does; tell whether the cache allowed it."""
    if cache.check_and_update_cache(engine_request, input_id):
        return True
    if not cache.can_allocate(engine_request, input_id, 1 << 20, 0):
        return False
    cache.allocate(engine_request, input_id)
    return True


def room(cache: TwoLevelCache) -> tuple[int, int]:
    return cache.num_free_slots, cache.num_freeable_slots


@pytest.fixture
def cache() -> TwoLevelCache:
    return encoder_cache(10)


def test_preallocation_does_not_evict_what_is_held(cache: TwoLevelCache) -> None:
    assert encode(cache, request("r", ("held", 5)))
    assert not cache.can_preallocate(6)
    with pytest.raises(ValueError, match="6 embeddings do not fit in 5"):
        cache.preallocate("cat", 6)
    assert room(cache) == (5, 5)


@pytest.mark.parametrize("how", ["entry", "preallocated"])
def test_an_item_is_not_given_room_twice(cache: TwoLevelCache, how: str) -> None:
    cache.preallocate("cat", 4)
    if how == "entry":
        cache.finalize_allocation("cat")
    with pytest.raises(ValueError, match="already"):
        cache.preallocate("cat", 4)


def test_reset_forgets_entries_and_keeps_what_is_on_its_way(cache: TwoLevelCache) -> None:
    r = request("r", ("held", 2), ("idle", 2))
    assert encode(cache, r, 0)
    assert encode(cache, r, 1)
    cache.free_encoder_input(r, 1)
    cache.preallocate("cat", 3)
    cache.reset()
    assert room(cache) == (7, 7)
    assert cache.get_cached_input_ids(r) == set()
    assert set(cache.get_freed_mm_hashes()) == {"held", "idle"}
    assert not cache.check_and_update_cache(request("s", ("cat", 3)), 0)
    cache.finalize_allocation("cat")
    assert cache.check_and_update_cache(request("s", ("cat", 3)), 0)
    cache.free(r)
    cache.deallocate("held", "r")
    assert room(cache) == (7, 7)
