"""Items on a prefill+decode side: every request ends, and nothing that it had is lost."""

from __future__ import annotations

import pytest

from tests.kit.side import Side, bare, media


def test_first_item_gets_space_that_others_hold_in_vain() -> None:
    side = Side(
        items={"x1": 8, "x2": 6, "y": 5}, cache=9, pool=11, seats=2, blocks=28, block=4, tokens=16
    )
    encoder = side.encoder()
    side.ask("before", 1, media("x1"), 3)
    side.until_ended("before", within_s=5.0)
    side.ask("running", 2, bare("y"), 2, answer=40, transfers={"y": "t-running"})
    side.turns()
    side.ask("A", 1, media("x1"), 3, media("x2"), 1)  # Its prefix covers x1.
    side.turns()
    side.ask("text", 3, answer=50)  # Has the other seat.
    side.turns()
    side.ask("B", 2, bare("x2"), 1, transfers={"x2": "t-B"})
    side.turns(2)
    side.encode(encoder, "t-running", "y")
    side.until_ended("text", "running", within_s=30.0)  # Their KV takes the place of the prefix.
    side.ask("C", 4)
    side.ask("D", media("x1"), 1)
    side.until_ended("A", "B", "C", "D", within_s=10.0)
    side.close()


def test_recomputed_item_is_not_awaited_from_seatless_request() -> None:
    side = Side(items={"x": 6, "y": 8}, cache=8, pool=20, seats=1, tokens=8)
    encoder = side.encoder()
    side.ask("running", 1, bare("x"), 60, transfers={"x": "t-x"})
    side.encode(encoder, "t-x", "x")
    side.until(lambda: side.computed("running") >= 24, within_s=10.0)
    side.ask("left", 1, media("y"), 1)  # Takes the place of x.
    side.turns()
    side.leave("left")
    side.ask("waiting", 1, media("x"), 1)  # Would encode x, and has no seat.
    side.turns()
    side.roll_back("running")
    side.ask("text", 4)
    side.until_ended("running", "waiting", "text", within_s=10.0)
    assert (side.ended["waiting"], side.ended["text"]) == ("length", "length")
    side.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_siblings_end_when_their_items_do_not_fit_together(
    siblings: int, prefix_caching: bool
) -> None:
    """Siblings end with an error, for the front, unless a prefix covers the item taken over."""
    side = Side(
        items={"x1": 6, "x2": 5, "y": 2},
        cache=9,
        pool=20,
        can_encode=False,
        prefix_caching=prefix_caching,
    )
    encoder = side.encoder()
    names = [f"{number}_r" for number in range(siblings)]
    for name in names:
        transfers = {"x1": "t1", "x2": "t2"}
        side.ask(name, 1, bare("x1"), 1, bare("x2"), 1, transfers=transfers)
    side.ask("other", 1, bare("y"), 1, transfers={"y": "t3"})
    for transfer_id, name in (("t1", "x1"), ("t2", "x2"), ("t3", "y")):
        side.encode(encoder, transfer_id, name)
    side.until_ended(*names, "other", within_s=10.0)
    served = names if prefix_caching else names[:1]
    assert {side.ended[name] for name in (*served, "other")} == {"length"}
    side.close()


def test_sibling_encodes_when_its_transfer_ended_before_it_came() -> None:
    side = Side(items={"x": 6, "y": 5}, cache=9, pool=20, block=16)
    encoder = side.encoder()
    side.ask("before", media("x"), 1)
    side.until_ended("before", within_s=5.0)  # So the first sibling needs no transfer of x.
    for name in ("0_r", "1_r"):
        side.ask(name, 1, media("x"), 1, media("y"), 1, transfers={"x": "t1", "y": "t2"})
    side.encode(encoder, "t2", "y")
    side.until_ended("0_r", "1_r", within_s=10.0)
    assert side.ended["0_r"] == side.ended["1_r"] == "length"
    side.close()


def test_transfer_ends_when_its_client_leaves() -> None:
    side = Side(items={"x": 4}, cache=16)
    side.encoder()
    side.ask("A", 1, bare("x"), 1, transfers={"x": "t-A"})  # Its job is queued at the encoder.
    side.turns(2)
    side.ask("B", 3, media("x"), 1)
    side.turns(2)
    side.leave("A")
    side.until_ended("B", within_s=5.0)
    side.close()


def test_transfer_without_client_ends_when_encoder_is_refused() -> None:
    side = Side(items={"x": 4, "y": 4}, cache=4)
    encoder, other = side.encoder(path=""), side.encoder("encode-1")
    side.ask("before", bare("y"), 1, transfers={"y": "t-y"})
    side.ask("A", 1, bare("x"), 1, transfers={"x": "t-A"})
    side.encode(encoder, "t-A", "x")
    side.until(lambda: side.transfers_waiting == 1, within_s=5.0)  # There is no space yet.
    side.ask("B", 3, media("x"), 1)
    side.leave("A")
    side.encode(other, "t-y", "y")
    side.until_ended("B", within_s=5.0)
    side.close()


def test_item_of_the_store_is_read() -> None:
    side = Side(items={"x": 4}, cache=16)
    side.store.entries.add("x")
    side.ask("A", 1, bare("x"), 1, transfers={"x": "t-x"}, stored=["t-x"])
    side.until_ended("A", within_s=5.0)
    assert side.ended == {"A": "length"}
    side.close()


def test_store_loads_end_with_their_requests() -> None:
    side = Side(items={"big": 8, "x": 8}, cache=8, seats=2)
    side.ask("holds", 1, bare("big"), 1, transfers={"big": "t-big"})
    for number in range(100):
        request_id, transfer_id = f"r{number}", f"t{number}"
        side.ask(request_id, 1, bare("x"), 1, transfers={"x": transfer_id}, stored=[transfer_id])
        side.leave(request_id)
    assert side.store.waiting == 0


def test_blocked_store_takes_no_slots_from_encoders() -> None:
    names = [f"s{number}" for number in range(8)]
    side = Side(
        items={"x": 2, **dict.fromkeys(names, 2)}, cache=200, pool=16, seats=64, can_encode=False
    )
    encoder = side.encoder()
    side.store.is_blocked = True
    for number in range(200):
        name, transfer_id = names[number % 8], f"t{number}"
        transfers = {name: transfer_id}
        side.ask(f"r{number}", 1, bare(name), 1, transfers=transfers, stored=[transfer_id])
        side.turns(5, seconds=0.1)
        side.leave(f"r{number}")
    side.ask("other", 1, bare("x"), 1, transfers={"x": "t-x"})
    side.encode(encoder, "t-x", "x")
    side.until_ended("other", within_s=5.0)
    assert side.ended["other"] == "length"
    assert side.store.idle_slots == 0
    assert side.pool_used <= (2 + 2 + 2) / 16  # Slots of two reads, and of x.
    side.store.is_blocked = False
    side.turns(100)
    side.close()


def test_requests_end_when_the_encoder_of_the_instance_hangs() -> None:
    side = Side(items={"x": 4, "y": 4}, cache=4, beside=True)
    side.worker.hangs = True
    side.ask("A", 1, media("x"), 1)
    side.ask("B", 1, media("y"), 1)  # There is no space beside x.
    side.ask("text", 4, answer=200)
    side.until_ended("A", "B", within_s=1500.0, seconds=1.0)
    assert side.ended["A"] == side.ended["B"] == "error"
    assert side.engine.metric("epd_pd_stalls_total") == 2
    assert side.scheduler.requests.keys() <= {"text"}


@pytest.mark.parametrize(
    ("text", "starts"), [(15, False), (300, True)], ids=["few tokens", "enough tokens"]
)
def test_start_before_a_missing_item_needs_enough_tokens(text: int, starts: bool) -> None:
    side = Side(items={"x": 8}, cache=8, min_start_tokens=256, tokens=512, blocks=200)
    encoder = side.encoder()
    side.ask("decodes", 3, answer=100)
    side.turns(2)
    side.ask("A", text, bare("x"), 1, transfers={"x": "t-A"})
    side.turns(5)
    assert side.computed("A") == (text if starts else 0)
    side.encode(encoder, "t-A", "x")
    side.until_ended("A", within_s=5.0)
    assert "decodes" not in side.ended
    side.leave("decodes")
    side.close()


def test_start_for_few_tokens_is_made_when_others_have_ended() -> None:
    side = Side(items={"x": 8}, cache=8, min_start_tokens=256)
    encoder = side.encoder()
    side.ask("decodes", 3, answer=100)
    side.turns(2)
    side.ask("A", 15, bare("x"), 1, transfers={"x": "t-A"})
    side.turns(5)
    assert side.computed("A") == 0
    side.leave("decodes")
    side.turns(2)
    assert side.computed("A") == 15
    side.ask("B", 15, bare("x"), 1, transfers={"x": "t-B"})
    side.turns(2)
    assert side.computed("B") == 15, "A waits for its item, and nobody decodes"
    side.encode(encoder, "t-A", "x")
    side.until_ended("A", "B", within_s=5.0)
    side.close()
