"""Items that a prefill+decode instance encodes beside its steps."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from epd_portable.encode.background import (
    TURNS,
    BackgroundEncoder,
    ComputeTurns,
    StepEncoder,
    TurnLengths,
)
from epd_portable.items.placer import EncodeOrder
from tests.unit.items.harness import Item, PrefillSide, sources
from tests.waiting import until

OWL = Item("owl", background=True)


def encoding(name: str) -> EncodeOrder:
    return EncodeOrder(mm_hash=name, modality="image", media=name)


class Block(torch.nn.Module):
    """A module that notes that it computes, when it is let."""

    def __init__(self, tower: Tower, number: int) -> None:
        super().__init__()
        self.tower, self.number = [tower], number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (tower,) = self.tower
        tower.begun.append(self.number)
        assert tower.may.acquire(timeout=30)
        return x + 1


class Tower(torch.nn.Module):
    """An encoder of three blocks.

    Attributes:
        begun: Numbers of the blocks that have begun.
        may: Each needs one of these to end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.may = threading.Semaphore(0)
        self.blocks = [Block(self, number) for number in range(3)]

    def encode(self, item: EncodeOrder) -> torch.Tensor:
        if item.mm_hash == "broken":
            raise RuntimeError("no such tower")
        output = torch.zeros(2, 3)
        assert output.is_inference()
        for block in self.blocks:
            output = block(output)
        return output


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def background(tower: Tower) -> Iterator[BackgroundEncoder]:
    background = BackgroundEncoder(tower.encode, tower.blocks)
    yield background
    tower.may.release(100)
    background.close()


def test_items_are_encoded_one_by_one_while_the_caller_goes_on(
    tower: Tower, background: BackgroundEncoder
) -> None:
    background.submit(encoding("a"))
    background.submit(encoding("b"))
    until(lambda: tower.begun == [0])
    placed: dict[str, torch.Tensor] = {}
    background.place(placed)
    assert (placed, background.take_ended()) == ({}, (set(), set()))
    tower.may.release(3)
    until(lambda: tower.begun == [0, 1, 2, 0])
    background.place(placed)
    assert list(placed) == ["a"]
    assert placed["a"].tolist() == [[3.0] * 3] * 2
    assert background.take_ended() == (set(), {"a"})
    assert background.take_ended() == (set(), set()), "once"


@contextmanager
def step(turns: ComputeTurns) -> Iterator[None]:
    turns.take_turn()
    yield
    turns.end_turn()


class WatchedTurns(ComputeTurns):
    """Counts how often the encoder has looked whether it may compute."""

    looks = 0

    def _may_encode(self) -> bool:
        found = super()._may_encode()
        self.looks += 1
        return found


class Encoder:
    """An encoder that asks for its turn in a thread, and says how often it got one."""

    def __init__(self, turns: ComputeTurns) -> None:
        self.turns = turns
        self.count = 0
        self.may_pause = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with self.turns.encoder():
            self.count += 1
            while self.may_pause.acquire(timeout=30) and self.count < 100:
                self.turns.pause()
                self.count += 1

    def close(self) -> None:
        self.count = 100
        self.may_pause.release()
        while self._thread.is_alive():
            with step(self.turns):
                """A step, for which the encoding may wait."""
            self._thread.join(timeout=0.01)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_encoder_gets_a_turn_after_so_many_steps(steps: int) -> None:
    turns = WatchedTurns(TurnLengths(encoder_s=0.0, steps=steps, rest_s=60.0))
    with step(turns):
        """No encoder waits, so the step does not count."""
    turns.take_turn()
    encoder = Encoder(turns)
    until(lambda: turns._asking)
    looks = turns.looks
    turns.end_turn()
    for done in range(1, steps):
        until(lambda before=looks: turns.looks > before)
        assert encoder.count == 0, f"{done} steps"
        looks = turns.looks
        with step(turns):
            """The encoder waits."""
    until(lambda: encoder.count == 1)
    waiting = threading.Thread(target=turns.take_turn)
    waiting.start()
    until(lambda: turns._stepping)
    assert waiting.is_alive(), "the encoder has not paused"
    encoder.may_pause.release()
    waiting.join()
    turns.end_turn()
    encoder.close()


def test_sampling_is_of_the_step_before_it() -> None:
    turns = ComputeTurns(TURNS["balanced"])
    turns.take_turn()
    encoder = Encoder(turns)
    until(lambda: turns._asking)
    turns.take_turn()
    assert encoder.count == 0, "the step has not ended"
    turns.end_turn()
    turns.end_turn()
    until(lambda: encoder.count == 1)
    encoder.close()


def test_step_computes_between_two_modules_of_the_encoder(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_module = TurnLengths(encoder_s=0.0, steps=8, rest_s=0.02)
    monkeypatch.setitem(TURNS, "tokens", one_module)
    background = BackgroundEncoder(tower.encode, tower.blocks, "tokens")
    background.submit(encoding("a"))
    until(lambda: tower.begun == [0])
    waiting = threading.Thread(target=background.turns.take_turn)
    waiting.start()
    until(lambda: background.turns._stepping)
    tower.may.release(3)
    waiting.join()
    assert tower.begun == [0]
    background.turns.end_turn()
    until(lambda: tower.begun == [0, 1, 2])
    background.close()


def test_a_turn_lasts_though_a_step_waits(tower: Tower) -> None:
    background = BackgroundEncoder(tower.encode, tower.blocks, "images")
    background.submit(encoding("a"))
    until(lambda: tower.begun == [0])
    tower.may.release(3)
    with step(background.turns):
        assert tower.begun == [0, 1, 2]
    background.close()


def test_a_step_that_encodes_by_itself_does_not_wait_for_itself(
    tower: Tower, background: BackgroundEncoder
) -> None:
    tower.may.release(3)
    with step(background.turns), torch.inference_mode():
        assert tower.encode(encoding("a")).tolist() == [[3.0] * 3] * 2


def test_failed_item_is_reported_and_the_next_is_encoded(
    tower: Tower, background: BackgroundEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("broken", "b"):
        background.submit(encoding(name))
    tower.may.release(3)
    placed: dict[str, torch.Tensor] = {}

    def there() -> bool:
        background.place(placed)
        return "b" in placed

    until(there)
    assert list(placed) == ["b"]
    assert background.take_ended() == ({"broken"}, {"b"})
    assert "item broken could not be encoded next to the steps" in caplog.text
    assert "no such tower" in caplog.text
    with step(background.turns):
        """A step that waits for no encoding."""


def test_item_submitted_before_a_reset_is_not_placed(tower: Tower) -> None:
    encoder = BackgroundEncoder(tower.encode, tower.blocks)
    encoder.submit(encoding("under way"))
    until(lambda: tower.begun == [0])
    encoder.submit(encoding("queued"))
    encoder.reset()
    encoder.submit(encoding("new"))
    tower.may.release(6)
    cache: dict[str, torch.Tensor] = {}
    ended: list[set[str]] = [set(), set()]

    def all_ended() -> bool:
        encoder.place(cache)
        for found, more in zip(ended, encoder.take_ended(), strict=True):
            found |= more
        return len(set.union(*ended)) == 3

    until(all_ended)
    assert ended == [{"under way", "queued"}, {"new"}]
    assert list(cache) == ["new"]
    tower.may.release(30)
    encoder.close()


def test_closing_ends_the_thread_after_the_item_under_way(tower: Tower) -> None:
    background = BackgroundEncoder(tower.encode, tower.blocks)
    background.submit(encoding("a"))
    background.submit(encoding("b"))
    until(lambda: tower.begun == [0])
    closing = threading.Thread(target=background.close)
    closing.start()
    until(lambda: background._closing)
    tower.may.release(3)
    closing.join()
    assert tower.begun == [0, 1, 2]
    assert not any(thread.name == "epd-encoder" for thread in threading.enumerate())
    assert not any(block._forward_pre_hooks for block in tower.blocks)


def test_workers_get_an_item_once_before_its_request_computes() -> None:
    pd = PrefillSide()
    pd.arrive("r", OWL)
    pd.step()
    pd.step()
    assert pd.encodings == ["owl"]
    assert not pd.encode_here("r", 0), "no step does it as well"
    assert pd.prefill.may_schedule("r", 0), "text before it is computed"
    assert not pd.prefill.may_schedule("r", 1)
    pd.cache.encoded("owl")
    assert pd.prefill.may_schedule("r", 1)
    assert sources(pd, "r") == {"owl": "local"}


def test_unneeded_item_holds_space_until_it_is_encoded() -> None:
    pd = PrefillSide(cache_tokens=3)
    pd.arrive("r", OWL)
    pd.step()
    pd.finish("r")
    pd.arrive("s", Item("elk", background=True))
    pd.step()
    assert pd.encodings == ["owl"], "two and two do not fit into three"
    pd.cache.encoded("owl")
    pd.step()
    assert pd.encodings == ["owl", "elk"]


def test_failed_encode_fails_requests_without_local_encode() -> None:
    """The other one may wait for its seat."""
    pd = PrefillSide()
    pd.arrive("r", OWL)
    pd.arrive("bare", dataclasses.replace(OWL, has_media=False))
    pd.shell.before_step()
    assert pd.prefill.may_schedule("bare", 0, running=True)
    pd.cache.not_encoded("owl")
    pd.shell.before_step()
    assert not pd.prefill.may_schedule("bare", 1, running=True)
    assert pd.prefill.take_unavailable() == {"bare"}
    pd.finish("bare")
    pd.cache.not_encoded("owl")
    assert pd.encode_here("r", 0)


def test_shared_queue_encodes_an_item_in_its_step(tower: Tower) -> None:
    encoder = StepEncoder(tower.encode)
    placed: dict[str, torch.Tensor] = {}
    encoder.place(placed)
    assert encoder.take_ended() == (set(), set()) and not placed
    tower.may.release(3)
    encoder.submit(encoding("broken"))
    encoder.submit(encoding("b"))
    encoder.place(placed)
    assert list(placed) == ["b"] and placed["b"].shape == (2, 3)
    assert encoder.take_ended() == ({"broken"}, {"b"})
    encoder.place(placed)
    assert encoder.take_ended() == (set(), set())
    encoder.close()
