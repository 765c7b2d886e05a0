"""Responses to clients when the encoder is slow, gone or wrong, or when space is short."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e import flags
from tests.e2e.asking import ask, ask_all, assert_equal, body, picture, post, text
from tests.e2e.conftest import Pair, encoders_held, every_instance_is_up, forget
from tests.e2e.engines import RESTART_S, counts, instance, metric, shared_memory, wait_until
from tests.e2e.one_pair.limits import ITEM_BYTES
from tests.unit.media.samples import png

ASK = text("What is in the picture?")
MANY_TOKENS = 4000


def test_text_before_image_is_prefilled_while_encoder_works(pair: Pair) -> None:
    name = "text-first"

    def steps() -> list[dict[str, Any]]:
        """Return the steps of this request: a front that has just begun sends requests itself."""
        events = pair.split.events("step", since_s=held_s)
        return [
            event
            for event in events
            if event["instance"].startswith("prefill_decode")
            and any(name in request for request in event["tokens"])
        ]

    content = [text("Look at this picture, please, and say what it shows: "), picture(1), ASK]
    with ThreadPoolExecutor() as pool:
        with encoders_held(pair.split) as held_s:
            headers = {"x-request-id": name}
            pending = pool.submit(ask, pair.split.url, content, headers=headers)
            wait_until(lambda: bool(steps()), "the text is computed")
            freed_s = time.monotonic()
        answer = pending.result()
    [item] = answer.items
    # Not the end of the encoding, which its process may note when the item is on its way already.
    ready = next(e for e in pair.split.events("output.ready") if e["mm_hash"] == item["mm_hash"])
    first, second, *_ = steps()
    assert first["t_s"] < freed_s < ready["t_s"] < second["t_s"]
    assert_equal(answer, ask(pair.reference_url, content))


def test_text_requests_do_not_wait_for_a_slow_picture(pair: Pair) -> None:
    with ThreadPoolExecutor() as pool:
        with encoders_held(pair.split) as held_s:
            pending = pool.submit(ask, pair.split.url, [picture(2), ASK])
            wait_until(lambda: bool(pair.split.encoding(held_s)), "the encoder began")
            ask(pair.split.url, "hello")
            assert not pending.done()
        assert pending.result().sources == ["transfer"]


def test_instances_count_every_item_and_its_bytes(pair: Pair) -> None:
    def seen(role: str) -> dict[str, int]:
        return dict(counts(pair.split.pid, role) - before[role])

    before = {role: counts(pair.split.pid, role) for role in ("ec_producer", "ec_consumer")}
    for seed in (20, 21, 22):
        assert ask(pair.split.url, [picture(seed), ASK]).sources == ["transfer"]
    assert seen("ec_consumer") == {
        'epd_pd_items_total{source="transfer"}': 3,
        'epd_pd_received_bytes_total{path="shm"}': 3 * ITEM_BYTES,
    }
    sent = {
        'epd_encode_transfers_total{source="encoder"}': 3,
        'epd_encode_transfers_ended_total{result="settled"}': 3,
        'epd_encode_sent_bytes_total{path="shm"}': 3 * ITEM_BYTES,
    }
    wait_until(lambda: seen("ec_producer") == sent, "the encode instance counts them as settled")


def test_encoder_without_memory_for_an_item_continues(pair: Pair) -> None:
    content = [picture(35), ASK]
    encoder = instance(pair.split.pid, "ec_producer")
    (pair.split.flags / flags.NO_MEMORY).write_text("each time")
    answer = ask(pair.split.url, content)
    (pair.split.flags / flags.NO_MEMORY).unlink()
    assert answer.sources == ["local"]
    assert_equal(answer, ask(pair.reference_url, content))
    # Its scheduler does not count on the item.
    forget(pair.split)
    assert ask(pair.split.url, content).sources == ["transfer"]
    assert instance(pair.split.pid, "ec_producer") == encoder


def test_a_killed_encoder_costs_no_answer_and_comes_back(pair: Pair) -> None:

    def encoder_pid() -> int:
        with suppress(AssertionError):
            return instance(pair.split.pid, "ec_producer").pid
        return 0

    content = [picture(3), ASK]
    with ThreadPoolExecutor() as pool, encoders_held(pair.split) as held_s:
        pending = pool.submit(ask, pair.split.url, content)
        wait_until(lambda: bool(pair.split.encoding(held_s)), "the encoder began")
        encoder = instance(pair.split.pid, "ec_producer")
        shared = shared_memory([encoder, *encoder.children(recursive=True)])
        os.killpg(encoder.pid, signal.SIGKILL)
        answer = pending.result()
    assert answer.sources == ["local"]
    assert_equal(answer, ask(pair.reference_url, content))

    # Right after the kill the front may not know yet that it is down.
    wait_until(
        lambda: encoder_pid() not in (0, encoder.pid) and every_instance_is_up(pair.split),
        "the encoder is back",
        within_s=RESTART_S,
    )
    assert ask(pair.split.url, [picture(4), ASK]).sources == ["transfer"]
    encoded = 'epd_encode_transfers_total{source="encoder"}'
    assert counts(pair.split.pid, "ec_producer")[encoded] >= 2
    assert [path for path in shared if path.exists() and not path.name.startswith("epd-")] == []


def test_a_small_pool_serves_everybody_first_come_first_served(
    pair: Pair, slow: Callable[[float], Any]
) -> None:
    slow(0.2)
    begun = len(pair.split.events())
    contents: list[Any] = [[picture(seed), ASK] for seed in range(40, 52)]
    contents += [
        [picture(seed + step) for step in range(0, 40, 10)] + [ASK] for seed in range(60, 64)
    ]
    answers = ask_all(pair.split.url, contents)
    for content, answer in zip(contents, answers, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))
        assert set(answer.sources) == {"transfer"}
    # A front that meets a restarted encoder sends an item of its own.
    asked = {item["mm_hash"] for answer in answers for item in answer.items}
    events = pair.split.events()[begun:]
    arrived = [
        item
        for event in events
        if event["event"] == "request.arrived"
        for item in event["awaited"]
        if item in asked
    ]
    reserved = [
        event["mm_hash"]
        for event in events
        if event["event"] == "item.reserved" and event["mm_hash"] in asked
    ]
    assert len(arrived) == 28
    assert reserved == arrived


def test_item_larger_than_pool_is_encoded_where_it_is_needed(pair: Pair) -> None:
    content = [picture(70, 448), ASK]
    answer = ask(pair.split.url, content)
    assert answer.sources == ["local"]
    assert_equal(answer, ask(pair.reference_url, content))
    assert ask(pair.split.url, [picture(1071), ASK]).sources == ["transfer"]


def test_a_spoiled_item_is_seen_by_the_comparison(pair: Pair) -> None:
    flag = pair.split.flags / flags.SPOIL
    content = [picture(180), ASK]
    flag.touch()
    try:
        spoiled = ask(pair.split.url, content)
    finally:
        flag.unlink()
    with pytest.raises(AssertionError):
        assert_equal(spoiled, ask(pair.reference_url, content))


def test_hostile_pictures_are_refused_while_others_are_served(pair: Pair) -> None:
    frame = b"\xff\xc0\0\x0b\x08\0\1\0\1\1\1\x11\0\xff\xda\0\0"
    files = {
        "png": png(30_000, 30_000),
        "x-portable-pixmap": b"P6#a\x11\xaf" + bytes(100),
        "jpeg": b"\xff\xd8\xff\xe0\0\2" + b"\xff" * 650_000 + frame[1:],
        "gif": b"GIF89a\1\0\1\0\0\0\0" + b"\1" * 65_000 + b",\0\0\0\0\1\0\1\0\0",
    }
    hostile = [
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        for kind, data in files.items()
    ]
    contents = [[picture(seed), ASK] for seed in range(1500, 1504)] + ["hello"] * 4
    with ThreadPoolExecutor(2 * len(hostile)) as pool:
        asked = [
            pool.submit(
                post, pair.split.url, body([{"type": "image_url", "image_url": {"url": url}}, ASK])
            )
            for url in 2 * hostile
        ]
        answers = ask_all(pair.split.url, contents)
        refused = [each.result() for each in asked]
    assert {each.status_code for each in refused} <= {400, 413}, [each.text for each in refused]
    for content, answer in zip(contents, answers, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))
    assert every_instance_is_up(pair.split)


def test_a_client_that_leaves_takes_its_work_along(
    pair: Pair, slow: Callable[[float], Any]
) -> None:
    def generated() -> float:
        return metric(pair.split.pid, "ec_consumer", "vllm:generation_tokens_total")

    slow(2.0)
    before = generated()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{pair.split.url}/v1/chat/completions",
            json=body([picture(190), ASK], max_tokens=MANY_TOKENS, ignore_eos=True),
            timeout=0.5,
            trust_env=False,
        )
    for role in ("ec_producer", "ec_consumer"):
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            wait_until(
                lambda role=role, gauge=gauge: metric(pair.split.pid, role, gauge) == 0,
                f"{role} has no request left",
            )
    assert generated() < before + MANY_TOKENS
