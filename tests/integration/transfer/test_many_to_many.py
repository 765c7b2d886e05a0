"""Two encode workers, each a process, for two receivers: every pair has items under way at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.contract.pairs import Route
from tests.integration.transfer.conftest import EncodeSide, PrefillSide
from tests.integration.transfer.encode_side import output

TOKENS = 50
ENCODERS = ("encode-0", "encode-1")


@pytest.fixture(scope="module")
def encoders(route: Route) -> Iterator[dict[str, EncodeSide]]:
    """Two of them for all tests of a route; each test has items and instances of its own."""
    sides = {name: EncodeSide(route.path, route.pair.encode, name) for name in ENCODERS}
    yield sides
    for side in sides.values():
        side.close()


def step_until(pds: list[PrefillSide], condition: Callable[[], bool]) -> None:
    """Step all instances, as their engines do, until the condition holds."""

    def stepped() -> bool:
        for pd in pds[1:]:
            pd.step()
        return condition()

    pds[0].step_until(stepped)


def test_items_of_a_request_come_from_several_encoders_and_each_is_in_its_place(
    make_pd: Callable[..., PrefillSide], encoders: dict[str, EncodeSide], path: str
) -> None:
    pds = [make_pd(), make_pd()]
    # Item by item the other encoder, and begun by the other one at the other instance.
    plans = [
        {f"item-{pd}-{item}": ENCODERS[(pd + item) % 2] for item in range(4)}
        for pd in range(len(pds))
    ]
    for pd, plan in zip(pds, plans, strict=True):
        pd.arrive_with("r", TOKENS, {mm_hash: f"t-{mm_hash}" for mm_hash in plan})
        for mm_hash, encoder in plan.items():
            encoders[encoder].tell("order", f"t-{mm_hash}", mm_hash, pd.address, TOKENS)
    for plan in plans:
        for mm_hash, encoder in reversed(plan.items()):
            encoders[encoder].tell("output", mm_hash, TOKENS)
    step_until(pds, lambda: [set(pd.placed) for pd in pds] == [set(plan) for plan in plans])
    for pd, plan in zip(pds, plans, strict=True):
        for mm_hash in plan:
            assert torch.equal(pd.encoder_cache[mm_hash].cpu(), output(mm_hash, TOKENS))
        items = pd.finish("r").items
        assert [(item.mm_hash, item.encoder) for item in items] == list(plan.items())
        assert {(item.source, item.path) for item in items} == {("transfer", path)}


def test_one_item_goes_to_two_instances_from_one_encoding(
    make_pd: Callable[..., PrefillSide], encoders: dict[str, EncodeSide]
) -> None:
    pds = [make_pd(), make_pd()]
    for number, pd in enumerate(pds):
        pd.arrive_with("r", TOKENS, {"cat": f"t-{number}"})
        encoders["encode-0"].tell("order", f"t-{number}", "cat", pd.address, TOKENS)
    encoders["encode-0"].tell("output", "cat", TOKENS)
    step_until(pds, lambda: [pd.placed for pd in pds] == [["cat"], ["cat"]])
    for pd in pds:
        assert torch.equal(pd.encoder_cache["cat"].cpu(), output("cat", TOKENS))
