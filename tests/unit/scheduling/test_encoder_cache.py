from __future__ import annotations

import pytest

from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from tests.unit.builders import FakeRequest, request


def encode(cache: EncoderCacheManager, engine_request: FakeRequest, input_id: int = 0) -> bool:
    """Encode an item here, as vLLM's scheduler does; tell whether the cache allowed it."""
    if cache.check_and_update_cache(engine_request, input_id):
        return True
    if not cache.can_allocate(engine_request, input_id, 1 << 20, 0):
        return False
    cache.allocate(engine_request, input_id)
    return True


def evict_all(cache: EncoderCacheManager) -> list[str]:
    """Take the room of every idle entry; return what went, oldest first."""
    room = cache.num_freeable_slots
    cache.preallocate("everything", room)
    cache.depreallocate("everything")
    return cache.get_freed_mm_hashes()


def room(cache: EncoderCacheManager) -> tuple[int, int]:
    return cache.num_free_slots, cache.num_freeable_slots


@pytest.fixture
def cache() -> EncoderCacheManager:
    return EncoderCacheManager(10)


# -- two-step allocation -------------------------------------------------------------------------


def test_preallocated_room_is_used_but_the_item_is_not_there_yet(
    cache: EncoderCacheManager,
) -> None:
    cache.preallocate("cat", 4)
    assert room(cache) == (6, 6)
    assert "cat" not in cache
    assert not cache.check_and_update_cache(request("r", ("cat", 4)), 0)


def test_a_finalized_item_is_an_entry_that_a_request_finds(cache: EncoderCacheManager) -> None:
    r = request("r", ("dog", 1), ("cat", 4))
    cache.preallocate("cat", 4)
    item = cache.finalize_allocation("cat")
    assert item.mm_hash == "cat" and item.is_here
    assert "cat" in cache
    assert cache.check_and_update_cache(r, 1)
    assert cache.get_cached_input_ids(r) == {1}
    assert cache.holders("cat") == {"r"}
    assert room(cache) == (6, 6)
    assert cache.get_cached_num_encoder_embeds(r, 1) == 4
    cache.free(r)
    assert room(cache) == (6, 10)


def test_an_item_finalized_for_nobody_is_idle(cache: EncoderCacheManager) -> None:
    cache.preallocate("cat", 4)
    cache.finalize_allocation("cat")
    assert cache.holders("cat") == frozenset()
    assert room(cache) == (6, 10)
    assert evict_all(cache) == ["cat"]
    assert room(cache) == (10, 10)


def test_an_item_is_finalized_once(cache: EncoderCacheManager) -> None:
    cache.preallocate("cat", 4)
    cache.finalize_allocation("cat")
    with pytest.raises(KeyError):
        cache.finalize_allocation("cat")
    cache.depreallocate("cat")
    assert room(cache) == (6, 10), "an entry is nothing that was preallocated"


def test_giving_preallocated_room_back_twice_counts_once(cache: EncoderCacheManager) -> None:
    cache.preallocate("cat", 4)
    cache.depreallocate("cat")
    cache.depreallocate("cat")
    assert room(cache) == (10, 10)
    with pytest.raises(KeyError):
        cache.finalize_allocation("cat")


def test_preallocation_does_not_evict_what_is_held(cache: EncoderCacheManager) -> None:
    assert encode(cache, request("r", ("held", 5)))
    assert not cache.can_preallocate(6)
    with pytest.raises(ValueError, match="6 embeddings do not fit in 5"):
        cache.preallocate("cat", 6)
    assert room(cache) == (5, 5)


@pytest.mark.parametrize("how", ["entry", "preallocated"])
def test_an_item_is_not_given_room_twice(cache: EncoderCacheManager, how: str) -> None:
    cache.preallocate("cat", 4)
    if how == "entry":
        cache.finalize_allocation("cat")
    with pytest.raises(ValueError, match="already"):
        cache.preallocate("cat", 4)


# -- transfers that hold entries -----------------------------------------------------------------


def test_a_retained_entry_outlives_its_request_until_it_is_deallocated(
    cache: EncoderCacheManager,
) -> None:
    r = request("r", ("cat", 6))
    assert encode(cache, r)
    cache.retain("cat", "t1")
    cache.retain("cat", "t2")
    cache.free(r)
    cache.deallocate("cat", "t1")
    cache.deallocate("cat", "t1")
    assert not cache.can_preallocate(5)
    cache.deallocate("cat", "t2")
    assert cache.can_preallocate(5)


def test_an_item_that_is_not_there_cannot_be_retained(cache: EncoderCacheManager) -> None:
    with pytest.raises(KeyError):
        cache.retain("cat", "t")
    cache.deallocate("cat", "t")


# -- eviction and reset --------------------------------------------------------------------------


def test_only_idle_entries_are_evicted_and_the_one_idle_for_longest_goes_first(
    cache: EncoderCacheManager,
) -> None:
    for name in ("a", "b", "c"):
        assert encode(cache, request(name, (name, 2)))
    for name in ("c", "b"):
        cache.free(request(name, (name, 2)))
    cache.preallocate("d", 5)
    assert cache.get_freed_mm_hashes() == ["c"]
    assert evict_all(cache) == ["b"]
    assert "a" in cache
    assert evict_all(cache) == []


def test_reset_forgets_entries_and_keeps_what_is_on_its_way(cache: EncoderCacheManager) -> None:
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
