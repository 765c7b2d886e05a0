from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.placement.caches import CacheSizes, Recent
from epd_portable.router.contents.body import Call, Rules, prompt_pieces, read_call
from epd_portable.router.prefix import chain

texts = st.lists(st.binary(max_size=40), max_size=6)


def blocks(messages: list[bytes], *, most: int = 100, salt: bytes = b"") -> tuple[int, ...]:
    return chain([[each] for each in messages], block_bytes=8, most=most, salt=salt).blocks


@given(first=texts, more=texts, others=texts)
def test_chains_are_equal_as_far_as_prompts_begin_alike(
    first: list[bytes], more: list[bytes], others: list[bytes]
) -> None:
    begun = blocks(first)
    one, other = blocks(first + more), blocks(first + others)
    assert one[: len(begun)] == begun == other[: len(begun)]
    if more and others and more[0][:8] != others[0][:8] and more[0] and others[0]:
        assert one[len(begun)] != other[len(begun)]
    assert not begun or blocks(first, salt=b"x")[0] != begun[0]


def test_what_is_too_long_is_only_counted() -> None:
    messages = [[b"a" * 20, memoryview(b"b" * 20)], [b"c" * 100]]
    found = chain(messages, block_bytes=8, most=4)
    assert (found.ends, found.tokens) == ((2, 4, 6, 8), 35)
    assert found.blocks == chain([[b"a" * 20 + b"b" * 12]], block_bytes=8, most=4).blocks
    assert chain(messages, block_bytes=8, most=7).blocks[:4] == found.blocks


def test_the_latest_are_kept() -> None:
    recent: Recent[int] = Recent(3)
    recent.use([1, 2, 3])
    recent.use([1, 4])
    assert [n in recent for n in (1, 2, 3, 4)] == [True, False, True, True]
    recent.pop(4)
    assert len(recent) == 2
    recent.clear()
    assert len(recent) == 0


def test_the_beginning_of_a_prompt_is_kept_longest() -> None:
    cached = CacheSizes(blocks=4).new_estimate()
    cached.use_prefix((1, 2, 3))
    cached.use_prefix((11, 12, 13))
    assert (cached.prefix((1, 2, 3)), cached.prefix((11, 12, 13))) == (1, 3)
    cached.clear()
    assert cached.prefix((11,)) == 0


# Prompts of requests.

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 8000}}
OTHER = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "B" * 8000}}
LONG = {"role": "system", "content": "x" * 5000}


def call(path: str = "/v1/chat/completions", **fields: object) -> Call:
    return read_call(path, msgspec.json.encode(fields), Rules())


def named(one: Call) -> tuple[int, ...]:
    return chain(prompt_pieces(one), block_bytes=64, most=1000).blocks


def user(*content: object) -> dict[str, object]:
    return {"role": "user", "content": list(content)}


@pytest.mark.parametrize("system", [[], [LONG]])
def test_a_conversation_begins_as_its_last_turn_did(system: list[object]) -> None:
    first = [*system, user({"type": "text", "text": "What is this?"}, PICTURE)]
    answer = {"role": "assistant", "content": "A cat."}
    then = [*first, answer, user({"type": "text", "text": "Why?"})]
    one, two = named(call(messages=first)), named(call(messages=then))
    assert len(one) > 1
    assert two[: len(one)] == one
    # The picture counts by its content, and takes no more than its name does.
    third = [*system, user({"type": "text", "text": "What is this?"}, OTHER)]
    assert named(call(messages=third)) != one
    assert len(one) < 10 + 100 * len(system)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x" * 5000}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/responses", {"input": "x" * 5000}),
        ("/v1/responses", {"input": [user({"type": "input_text", "text": "a"})]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_every_interface_has_its_prompt(path: str, fields: dict[str, object]) -> None:
    assert named(call(path, **fields)) == named(call(path, **fields))
    assert named(call(path, **fields))


def test_a_body_that_nobody_read_has_none() -> None:
    assert named(Call.untouched("POST", "/v1/audio/transcriptions", b"x")) == ()


def test_whose_caches_have_a_beginning_is_known_without_a_look_at_all() -> None:
    chance = random.Random(11)
    caches = CacheSizes(blocks=12)
    everybody = [caches.new_estimate() for _ in range(5)]
    prompts = [tuple(10 * n + depth for depth in range(1 + n % 7)) for n in range(30)]
    hits = 0
    for _ in range(2000):
        one = chance.choice(everybody)
        if chance.random() < 0.02:
            one.clear()
        else:
            one.use_prefix(chance.choice(prompts))
        for blocks in prompts:
            having = {each for each in everybody if blocks[0] in each.blocks}
            assert set(caches.with_prefix(blocks)) == having
            hits += len(having)
    assert hits
    for each in everybody:
        each.clear()
    assert not any(caches.with_prefix(blocks) for blocks in prompts)


def test_how_much_of_a_prompt_is_known_is_found_from_any_guess() -> None:
    one = CacheSizes(blocks=5).new_estimate()
    one.use_prefix(tuple(range(8)))
    assert [one.prefix(tuple(range(8)), guess) for guess in range(9)] == [5] * 9
    assert [one.prefix((9, 8), guess) for guess in range(3)] == [0] * 3
    assert [one.prefix((0, 1), guess) for guess in range(3)] == [2] * 3
