"""A real encode worker and a real receiver in two processes, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epd_portable.transfer.pool import SharedMemory
from tests.contract.pairs import ROUTES, parameters
from tests.kit.encode_side import WIDTH, output
from tests.kit.ends import EncodeSide, PrefillSide

TOKEN_BYTES = WIDTH * 4


@pytest.mark.parametrize("route", parameters(ROUTES), indirect=True)
def test_item_arrives_as_a_view_of_the_pool_where_possible(
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
    assert torch.equal(placed.cpu(), output("cat", 300))
    if pd.computes_in_slots:
        SharedMemory.open(pd.pool).tensor(0, pd.pool_bytes).zero_()
        assert placed.eq(0).all(), "the tensor is the pool's memory"
    else:
        pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)
    (item,) = pd.finish("r").items
    assert (item.source, item.encoder, item.path) == ("transfer", "encode-0", path)
    assert item.nbytes == 300 * TOKEN_BYTES


def test_messages_between_steps(make_pd: Callable[..., PrefillSide], encode: EncodeSide) -> None:
    pd = make_pd()
    pd.shell.listen()
    with pd.shell.lock:
        pd.arrive("r", "cat", 300)
        encode.tell("order", "t-r", "cat", pd.address, 300)
        encode.tell("output", "cat", 300)
    pd.wait_until(lambda: "cat" in pd.cache)
    assert pd.placed == []
    pd.step()
    assert pd.placed == ["cat"]
    assert torch.equal(pd.encoder_cache["cat"].cpu(), output("cat", 300))
    with pd.shell.lock:
        (item,) = pd.finish("r").items
    assert item.source == "transfer"


def test_deadlines_between_steps(make_pd: Callable[..., PrefillSide], encode: EncodeSide) -> None:
    pd = make_pd(lease_s=0.5)
    pd.shell.listen()
    with pd.shell.lock:
        pd.arrive("r", "cat", 300)
    encode.tell("order", "t-r", "cat", pd.address, 300)
    pd.wait_until(lambda: pd.granted("t-r"))
    encode.process.kill()
    pd.wait_until(lambda: pd.prefill.may_schedule("r", 1))
    pd.step_until(lambda: pd.free_bytes == pd.pool_bytes)


def test_a_small_pool_keeps_order(make_pd: Callable[..., PrefillSide], encode: EncodeSide) -> None:
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
        assert torch.equal(pd.encoder_cache[name].cpu(), output(name, 100))
        pd.finish(name)
    assert pd.placed == names
    pd.cache.reset()
    pd.step()
    assert pd.free_bytes == pd.pool_bytes


def test_a_video_that_the_pool_cannot_hold_comes_part_by_part(
    make_pd: Callable[..., PrefillSide], encode: EncodeSide
) -> None:
    pd = make_pd(pool_bytes=250 * TOKEN_BYTES)
    pd.arrive("whole", "video", 400)
    assert pd.prefill.take_unavailable() == {"whole"}
    pd.finish("whole")
    parts = {f"video#{pair}-{pair + 1}": f"t-{pair}" for pair in range(4)}
    pd.arrive_with("r", 100, parts)
    for name, transfer_id in reversed(parts.items()):
        encode.tell("order", transfer_id, name, pd.address, 100)
        encode.tell("output", name, 100)
    items = pd.cache.requests["r"].items
    for name, item in zip(parts, items, strict=True):
        pd.step_until(
            lambda name=name, item=item: (
                name in pd.placed and pd.prefill.may_schedule("r", item.begin)
            )
        )
        assert torch.equal(pd.encoder_cache[name].cpu(), output(name, 100))
        assert pd.prefill.may_schedule("r", item.end - 1), "the prompt is computed that far"
    assert sorted(pd.placed) == [*parts], "each came once"
    assert [each.source for each in pd.finish("r").items] == ["transfer"] * 4
