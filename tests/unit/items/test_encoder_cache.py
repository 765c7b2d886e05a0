from __future__ import annotations

import pytest

from epd_portable.encode.two_levels import TwoLevelCache
from epd_portable.items.table import Item, State
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


def test_an_item_with_space_is_not_given_space_again(cache: TwoLevelCache) -> None:
    item = Item("cat", 4)
    cache.occupy(item, State.RESERVED)
    with pytest.raises(AssertionError, match="cat: RESERVED to LOCAL"):
        cache.occupy(item, State.LOCAL)


def test_reset_forgets_entries_and_keeps_what_is_on_its_way(cache: TwoLevelCache) -> None:
    r = request("r", ("held", 2), ("idle", 2))
    assert encode(cache, r, 0)
    assert encode(cache, r, 1)
    cache.free_encoder_input(r, 1)
    item = Item("cat", 3)
    cache.occupy(item, State.RESERVED)
    cache.reset()
    assert room(cache) == (7, 7)
    assert cache.get_cached_input_ids(r) == set()
    assert set(cache.get_freed_mm_hashes()) == {"held", "idle"}
    assert not cache.check_and_update_cache(request("s", ("cat", 3)), 0)
    cache.grant(item)
    cache.land(item)
    assert room(cache) == (7, 10), "it may be evicted again"
    assert cache.check_and_update_cache(request("s", ("cat", 3)), 0)
    cache.free(r)
    assert room(cache) == (7, 7)
