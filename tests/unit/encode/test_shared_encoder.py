"""Encode jobs of an instance that has requests of its own."""

from __future__ import annotations

import pytest

from epd_portable.encode.dispatcher import Dispatcher, EncodedItem
from epd_portable.encode.shared_encoder import SharedEncoder
from epd_portable.items.table import State
from epd_portable.wire.params import EncodeParams, EncodeTransfer, is_encode_job, to_params
from tests.unit.builders import SECRET, encode_params, place
from tests.unit.items.harness import CAT, Item, Pair, PrefillSide, spec

OTHER = "tcp://other"


class Shared:
    """A PD side of ten embeddings, and its encode jobs."""

    def __init__(self) -> None:
        self.pair = Pair(pd=PrefillSide(cache_tokens=10))
        self.pd = self.pair.pd
        self.cache = self.pd.cache
        self.dispatcher = Dispatcher(self.cache, SECRET)
        self.encoder = SharedEncoder(self.dispatcher, self.pd.prefill, self.cache)

    def ask(self, name: str, size: int = 2, *, media: bool = True, signed: bool = True) -> str:
        """Send a job for an item; return its id."""
        job = f"job-{name}"
        params = encode_params({name: name}, OTHER)
        if not signed:
            unsigned = EncodeTransfer(transfer_id=name, item_uuid=name, consumer=OTHER)
            params = EncodeParams(transfers=(unsigned,))
        self.dispatcher.request_arrived(job, [EncodedItem(name, "image", spec(size))], params)
        content = object() if media else None
        self.encoder.arrived(job, [place(name, spec(size), has_media=media, media=content)])
        self.encoder.advance()
        return job

    def encoded(self, *names: str) -> None:
        """Workers have encoded items."""
        for name in names:
            self.cache.encoded(name)
        self.encoder.advance()

    @property
    def told(self) -> list[str]:
        """Items that workers were told to encode since the last call."""
        orders = self.pd.shell.orders.take_orders(self.cache.get_freed_mm_hashes(), computes=False)
        self.pd.shell.step_done()
        return [each.mm_hash for each in orders.encodings]

    def sent(self) -> list[str]:
        """Return the jobs whose items are sent, by their transfers."""
        return [f"job-{each.transfer_id}" for each in self.encoder.take_orders()]

    def arrived(self, *names: str) -> None:
        """Items have come to whom they were sent."""
        self.dispatcher.transfers_ended(names)
        self.encoder.advance()

    def answered(self) -> list[str]:
        return self.encoder.take_ended()

    def assert_all_room_is_back(self) -> None:
        assert not self.cache.requests and not self.cache.incomplete
        assert self.cache.num_freeable_slots == self.cache.cache_size


@pytest.fixture
def shared() -> Shared:
    return Shared()


def test_item_space_is_held_until_the_item_is_delivered(shared: Shared) -> None:
    job = shared.ask("a")
    assert shared.told == ["a"] and not shared.sent() and not shared.answered()
    assert list(shared.cache.requests) == [job]
    shared.encoded("a")
    assert shared.sent() == [job] and shared.answered() == [job]
    assert shared.cache.num_freeable_slots == 8
    shared.arrived("a")
    shared.assert_all_room_is_back()


def test_jobs_are_begun_one_after_the_other(shared: Shared) -> None:
    shared.ask("a")
    shared.ask("b")
    assert shared.told == ["a"]
    shared.encoded("a")
    assert shared.told == ["b"]


def test_transfers_to_others_keep_half_of_the_room_at_most(shared: Shared) -> None:
    first = shared.ask("a", 3)
    shared.encoded("a")
    second = shared.ask("b", 3)
    assert shared.told == ["a"] and shared.answered() == [first]
    shared.arrived("a")
    assert shared.told == ["b"]
    shared.encoded("b")
    assert shared.answered() == [second]


def test_repeated_job_begins_when_its_transfer_is_reported(shared: Shared) -> None:
    job = shared.ask("a")
    shared.encoded("a")
    assert shared.sent() == shared.answered() == [job]
    assert shared.ask("a") == job and not shared.sent()
    shared.arrived("a")
    assert shared.sent() == shared.answered() == [job]


def test_item_larger_than_the_encoder_half_fails_at_once(shared: Shared) -> None:
    job = shared.ask("a", 6)
    assert shared.sent() == [job] == shared.answered() and not shared.told
    shared.assert_all_room_is_back()


def test_an_item_that_another_instance_brings_is_not_passed_on(shared: Shared) -> None:
    shared.pd.arrive("r", CAT)
    job = shared.ask("cat", CAT.num_tokens)
    assert shared.sent() == [job] == shared.answered()
    assert not shared.told and shared.cache.holders("cat") == frozenset()
    shared.pair.encode.submit(CAT, ready=True)
    shared.pair.settle()
    assert shared.pd.prefill.may_schedule("r", 1), "its own request is served all the same"


def test_a_request_may_have_what_is_encoded_for_others(shared: Shared) -> None:
    shared.ask("cat", CAT.num_tokens)
    shared.pd.arrive("r", Item("cat", background=True))
    assert shared.told == ["cat"]
    assert not shared.pd.prefill.may_schedule("r", 1)
    shared.encoded("cat")
    assert shared.pd.prefill.may_schedule("r", 1)


def test_item_is_encoded_without_the_step_of_its_request(shared: Shared) -> None:
    shared.pd.arrive("r", Item("cat"))
    assert shared.cache.items["cat"].state is State.LOCAL
    job = shared.ask("cat", 2)
    assert shared.told == ["cat"]
    shared.encoded("cat")
    assert shared.answered() == [job]
    assert shared.pd.prefill.may_schedule("r", 1)


def test_failed_item_is_retried_once_and_then_fails(shared: Shared) -> None:
    job = shared.ask("a")
    assert shared.told == ["a"]
    shared.cache.not_encoded("a")
    shared.encoder.advance()
    assert shared.told == [], "some ranks may have it, which workers forget first"
    assert shared.told == ["a"] and not shared.answered()
    shared.cache.not_encoded("a")
    shared.encoder.advance()
    shared.encoder.fail(job, "it has ended")
    assert shared.answered() == [job] == shared.sent()
    shared.assert_all_room_is_back()


def test_a_job_without_media_is_given_up(shared: Shared) -> None:
    job = shared.ask("a", media=False)
    assert shared.answered() == [job] == shared.sent()


def test_a_job_that_nobody_has_signed_is_sent_to_nobody(shared: Shared) -> None:
    job = shared.ask("a", signed=False)
    shared.encoded("a")
    assert shared.answered() == [job] and not shared.sent()
    shared.assert_all_room_is_back()


@pytest.mark.parametrize("name", ["waiting", "current", "done"])
def test_a_job_that_is_withdrawn_leaves_nothing(shared: Shared, name: str) -> None:
    for each in ("done", "current", "waiting"):
        shared.ask(each, 1)
    shared.encoded("done")
    shared.encoder.withdraw(f"job-{name}")
    for each in ("current", "waiting"):
        if each in shared.told or shared.cache.items.get(each):
            shared.encoded(each)
    assert f"job-{name}" not in shared.answered()
    shared.arrived("done", "current", "waiting")
    shared.assert_all_room_is_back()


def test_a_reset_gives_the_room_of_what_is_sent_back(shared: Shared) -> None:
    job = shared.ask("a")
    shared.encoded("a")
    assert shared.answered() == [job]
    shared.pd.arrive("r", Item("a", background=True))
    shared.cache.reset()
    assert "a" not in shared.cache and not shared.cache.items["a"].holders
    shared.arrived("a")
    shared.pd.finish("r")
    shared.assert_all_room_is_back()


def test_parameters_tell_a_job_from_a_request() -> None:
    transfer = EncodeTransfer(transfer_id="t", item_uuid="a", consumer=OTHER)
    assert is_encode_job(to_params(EncodeParams(transfers=(transfer,))))
    for other in (None, {}, {"transfers": None}, {"transfers": [{"transfer_id": "t"}]}):
        assert not is_encode_job(other)


def test_item_encoded_during_a_reset_is_encoded_again(shared: Shared) -> None:
    job = shared.ask("a")
    assert shared.told == ["a"]
    shared.cache.reset()  # Workers may have had the output already, and forget it.
    shared.encoded("a")
    assert shared.told == [], "workers forget it first"
    assert shared.told == ["a"] and not shared.answered()
    shared.encoded("a")
    assert shared.answered() == [job] == shared.sent()
