"""Resets of encoder caches, pauses and preemption, over vLLM's real schedulers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from epd_portable.vllm_plugin import compat
from tests.kit.side import Side, bare, media


@pytest.mark.parametrize("turns", range(0, 24, 2))
def test_item_under_way_is_encoded_again_with_new_weights(turns: int) -> None:
    side = Side(items={"x": 4}, cache=16, can_encode=False, copies=bool(turns % 4))
    encoder = side.encoder()
    side.ask("A", 1, bare("x"), 1, answer=9, transfers={"x": "t-A"})
    side.encode(encoder, "t-A", "x")
    side.turns(turns)
    side.update_weights()
    side.turns(2)
    if "t-A" in side.engine.requested:
        side.encode(encoder, "t-A", "x")
    side.ask("B", 3, bare("x"), 1, transfers={"x": "t-B"})
    side.encode(encoder, "t-B", "x")
    side.until_ended("A", "B", within_s=20.0)
    assert set(side.ended.values()) == {"length"}
    side.close()


def test_item_aborted_before_its_request_comes_is_not_awaited() -> None:
    side = Side(items={"x": 4}, cache=16)
    encoder = side.encoder()
    side.encode(encoder, "t-A", "x")
    side.turns()  # It is announced.
    side.update_weights()
    side.turns()
    side.ask("A", 1, media("x"), 1, transfers={"x": "t-A"})
    side.until_ended("A", within_s=5.0)
    assert side.ended["A"] == "length"
    side.close()


def test_item_aborted_before_announcement_is_requested_again() -> None:
    side = Side(items={"x": 4}, cache=16, can_encode=False)
    encoder = side.encoder()
    side.ask("A", 1, bare("x"), 1, transfers={"x": "t-A"})
    side.encode(encoder, "t-A", "x")
    side.update_weights()  # Before anything is sent.
    side.until(lambda: "t-A" in side.engine.requested, within_s=5.0)
    side.encode(encoder, "t-A", "x")
    side.until_ended("A", within_s=10.0)
    assert side.ended["A"] == "length"
    side.close()


@pytest.mark.parametrize("is_blocked", [True, False])
def test_store_load_under_way_becomes_no_entry_after_a_reset(is_blocked: bool) -> None:
    side = Side(items={"x": 4}, cache=16, can_encode=False)
    encoder = side.encoder()
    side.store.entries = {"x"}
    side.store.is_blocked = is_blocked
    side.ask("A", 1, bare("x"), 1, transfers={"x": "t-A"}, stored=["t-A"])
    side.turns()  # A thread fills the slot.
    side.update_weights()
    side.store.is_blocked = False
    side.until(lambda: "t-A" in side.engine.requested, within_s=10.0)
    side.encode(encoder, "t-A", "x")
    side.until_ended("A", within_s=20.0)
    assert side.ended["A"] == "length"
    side.close()


@pytest.mark.parametrize("turns", range(4))
def test_item_in_the_background_is_encoded_again_after_a_reset(turns: int) -> None:
    side = Side(items={"x": 4}, cache=16, beside=True)
    side.worker.hangs = True
    side.ask("A", 1, media("x"), 1)
    side.turns(turns)
    side.worker.hangs = False
    side.update_weights()
    side.until_ended("A", within_s=10.0)
    assert side.ended["A"] == "length"
    side.close()


def test_pause_that_aborts_returns_jobs_of_other_engines() -> None:
    side = Side(items={"x": 4, "big": 8}, cache=8)
    side.ask("A", 1, media("big"), 1, answer=1000)
    side.turns(2)
    side.engine.add_job("J", "x", 4)  # Waits for space that A has.
    side.turns()
    job = side.scheduler.finish_requests("J", RequestStatus.FINISHED_ABORTED)
    assert [(each.request_id, each.client_index) for each in job] == [("J", 0)]
    side.engine.jobs.discard("J")
    side.engine.add_job("K", "x", 4)
    side.engine.pause("abort")  # Fails unless vLLM gets all of them.
    side.engine.resume()
    side.close()


def test_jobs_are_returned_as_vllm_before_026_returns_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(items={"x": 4}, cache=4)
    side.engine.add_job("J", "x", 4)
    with monkeypatch.context() as before:
        before.setattr(compat, "version", lambda: (0, 23))
        returned = side.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert returned == [("J", 0)]
    side.engine.jobs.discard("J")
    side.close()


def test_jobs_of_other_engines_end_while_a_pause_waits() -> None:
    side = Side(items={"x": 4}, cache=16)
    side.engine.pause("wait")
    side.engine.add_job("J", "x", 4)
    side.until(lambda: not side.engine.jobs, within_s=5.0)
    assert side.engine.is_paused()
    side.engine.pause("keep")
    side.engine.add_job("K", "x", 4)
    assert side.engine.is_paused()
    side.engine.resume()
    side.until(lambda: not side.engine.jobs, within_s=5.0)
    side.close()


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_requests_have_their_whole_time_after_a_pause(mode: str) -> None:
    side = Side(items={"x": 4}, cache=16, can_encode=False)
    encoder = side.encoder()
    side.engine.pause(mode)
    side.ask("A", 1, bare("x"), 1, transfers={"x": "t-A"})
    for _ in range(50):
        side.clock.now += 10.0
        side.engine.take_in()
    side.engine.resume()
    side.turns(2)
    side.encode(encoder, "t-A", "x")
    side.until_ended("A", within_s=10.0)
    assert side.ended["A"] == "length"
    side.close()


def test_item_that_one_rank_cannot_encode_is_encoded_again() -> None:
    side = Side(items={"x": 4, "y": 4}, cache=8)
    side.worker.ranks = 2
    side.worker.fails_once.add("x")
    side.engine.add_job("J", "x", 4)
    side.until(lambda: not side.engine.jobs, within_s=10.0)
    assert side.worker.seen["items encoded by some ranks"] == 1
    side.ask("A", 1, media("x"), media("y"), 1)
    side.until_ended("A", within_s=10.0)
    side.close()


def preempt(side: Side) -> None:
    side.engine.reset_prefix_cache(running=True)


def roll_back(side: Side) -> None:
    side.roll_back("r")


@pytest.mark.parametrize("second", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize("covered", [False, True], ids=["computed", "prefix hit"])
@pytest.mark.parametrize("again", [preempt, roll_back])
def test_item_is_encoded_again_from_its_media(
    again: Callable[[Side], None], covered: bool, second: bool
) -> None:
    side = Side(items={"x": 6, "y": 6}, cache=8, second=second)
    if covered:
        side.ask("before", 1, media("x"), 5)
        side.until_ended("before", within_s=5.0)
    side.ask("r", 1, media("x"), 5, answer=40)
    side.until(lambda: side.computed("r") > 12, within_s=5.0)
    side.ask("other", 1, media("y"), 1)  # Takes the space of x.
    side.until_ended("other", within_s=5.0)
    encoded = side.worker.seen["items encoded in a step"]
    again(side)
    side.until_ended("r", within_s=10.0)
    assert side.ended["r"] == "length"
    assert side.worker.seen["items encoded in a step"] == encoded + 1
    side.close()
