"""Caches that serve an item when its request is sent again, and the recovery of lost items."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.asking import ask, assert_equal, picture, text
from tests.e2e.conftest import Pair, forget, slow_steps
from tests.e2e.engines import counts, metric, wait_until
from tests.e2e.one_pair.limits import SEATS

ASK = text("What is in the picture?")


def test_items_that_left_the_engine_come_from_the_encoders_cache(pair: Pair) -> None:
    room = metric(pair.split.pid, "ec_consumer", "epd_pd_encoder_cache_embeddings")
    contents = [[picture(seed, 224), ASK] for seed in range(7000, 7000 + int(room) // 64 + 2)]
    before = counts(pair.split.pid, "ec_producer")
    first = [ask(pair.split.url, content) for content in contents]
    encoded = pair.split.encoded_by("encode")
    again = ask(pair.split.url, [text("Look: "), *contents[0]])
    assert again.sources == ["transfer"]
    assert pair.split.encoded_by("encode") == encoded
    after = counts(pair.split.pid, "ec_producer")
    name = 'epd_encode_transfers_total{{source="{}"}}'.format
    risen = {each: after[name(each)] - before[name(each)] for each in ("encoder", "cache", "host")}
    assert risen == {"encoder": len(contents), "cache": 1, "host": 0}
    assert_equal(again, ask(pair.reference_url, [text("Look: "), *contents[0]]))
    assert all(answer.sources == ["transfer"] for answer in first)


def test_a_prompt_in_the_prefix_cache_needs_no_item(pair: Pair) -> None:
    content = [picture(501), text("What is in the picture? Please say it. " * 8)]
    first = ask(pair.split.url, content)
    assert first.sources == ["transfer"]
    forget(pair.split, "encoder_cache")
    again = ask(pair.split.url, content)
    assert again.sources == ["prefix_cache"]
    assert_equal(again, first)
    assert metric(pair.split.pid, "ec_consumer", "vllm:prefix_cache_hits_total") > 0


def test_cache_salt_separates_prompts_and_shares_items(pair: Pair) -> None:
    content = [picture(503), text("What is in the picture? Please say it. " * 8)]
    first = ask(pair.split.url, content, cache_salt="a")
    others = [ask(pair.split.url, content, cache_salt="b"), ask(pair.split.url, content)]
    assert [first.sources, *(each.sources for each in others)] == [
        ["transfer"],
        ["encoder_cache"],
        ["encoder_cache"],
    ]
    forget(pair.split, "encoder_cache")
    again = [ask(pair.split.url, content, cache_salt=salt) for salt in ("a", "c")]
    assert [each.sources for each in again] == [["prefix_cache"], ["transfer"]]
    for answer in (*others, *again):
        assert_equal(answer, first)


def test_item_evicted_before_its_use_is_encoded_locally(pair: Pair) -> None:
    content = [picture(502), ASK]
    landed = len(pair.split.events("item.landed"))
    with ThreadPoolExecutor(SEATS + 1) as pool:
        with slow_steps(pair.split, 0.5):
            # Others have every seat until the item is there and gone again.
            others = [
                pool.submit(ask, pair.split.url, "hello", max_tokens=200, ignore_eos=True)
                for _ in range(SEATS)
            ]
            wait_until(
                lambda: metric(pair.split.pid, "ec_consumer", "vllm:num_requests_running") == SEATS,
                "every seat is taken",
            )
            pending = pool.submit(ask, pair.split.url, content)
            wait_until(lambda: len(pair.split.events("item.landed")) > landed, "the item landed")
            forget(pair.split, "encoder_cache")
            assert not any(other.done() for other in others)
        answer = pending.result()
    assert answer.sources == ["local"]
    assert_equal(answer, ask(pair.reference_url, content))
