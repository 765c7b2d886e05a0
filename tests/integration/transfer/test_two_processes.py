"""A real encode worker and a real receiver in two processes, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd_portable.connector.pool import SharedMemory
from tests.integration.transfer.conftest import EncodeSide, PrefillSide
from tests.integration.transfer.encode_side import WIDTH, output

TOKEN_BYTES = WIDTH * 4


def test_an_item_arrives_as_a_view_of_the_pool_and_equals_the_source(
    make_pd: Callable[..., PrefillSide], encode: EncodeSide, path: str
) -> None:
    pd = make_pd()
    pd.arrive("r", "cat", 300)
    encode.tell("order", "t-r", "cat", pd.address, 300)
    pd.step_until(lambda: pd.free_bytes < pd.pool_bytes)
    assert pd.placed == [], "announced and granted, but not put out yet"
    encode.tell("output", "cat", 300)
    pd.step_until(lambda: pd.placed == ["cat"])
    placed = pd.encoder_cache["cat"]
    assert torch.equal(placed, output("cat", 300))
    SharedMemory.open(pd.pool).tensor(0, pd.pool_bytes).zero_()
    assert placed.eq(0).all(), "the tensor is the pool's memory"
    (item,) = pd.finish("r").items
    assert (item.source, item.encoder, item.path) == ("transfer", "encode-0", path)
    assert item.nbytes == 300 * TOKEN_BYTES


def test_a_producer_killed_with_a_grant_gives_its_slot_back_and_the_item_is_encoded_here(
    make_pd: Callable[..., PrefillSide], encode: EncodeSide
) -> None:
    pd = make_pd()
    pd.arrive("r", "cat", 300)
    encode.tell("order", "t-r", "cat", pd.address, 300)
    pd.step_until(lambda: pd.free_bytes < pd.pool_bytes)
    encode.process.kill()
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    assert pd.receiver.may_schedule("r", 1)
    assert pd.cache.can_allocate(pd.requests["r"], 0, 1000, 0)


def test_a_pool_too_small_for_all_serves_them_in_the_order_of_arrival(
    make_pd: Callable[..., PrefillSide], encode: EncodeSide
) -> None:
    pd = make_pd(pool_bytes=100 * TOKEN_BYTES)
    names = [f"item-{number}" for number in range(6)]
    for name in names:
        pd.arrive(name, name, 100)
    for name in reversed(names):
        encode.tell("output", name, 100)
        encode.tell("order", f"t-{name}", name, pd.address, 100)
        encode.tell("output", name, 100)
    for served, name in enumerate(names, start=1):
        pd.step_until(lambda served=served: len(pd.placed) == served)
        assert torch.equal(pd.encoder_cache[name], output(name, 100))
        pd.finish(name)
    assert pd.placed == names
    pd.cache.reset()
    pd.step()
    assert pd.free_bytes == pd.pool_bytes
