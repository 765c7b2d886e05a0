"""An encode engine whose queue is short: what it encodes in one step, and what it does not take."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.asking import ask, assert_equal, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair, encoders_held
from tests.e2e.engines import counted, cpu_s, instance, wait_until
from tests.e2e.one_pair.limits import QUEUE


def until_nothing_is_in_flight(pair: Pair) -> None:
    for series in ("epd_front_instance_in_flight", "vllm:num_requests_running"):
        wait_until(lambda series=series: counted(pair.split.url, series) == 0, f"{series} is 0")


def test_items_that_wait_are_encoded_in_one_step(pair: Pair) -> None:
    with ThreadPoolExecutor() as pool:
        with encoders_held(pair.split) as held_s:
            first = pool.submit(ask, pair.split.url, [picture(310), ASK])
            wait_until(lambda: bool(pair.split.encoding(held_s)), "the encoder began")
            items = [picture(seed) for seed in range(311, 319)]
            pending = pool.submit(ask, pair.split.url, [*items, ASK])
            in_flight = 'epd_front_instance_in_flight{role="encode"}'
            wait_until(lambda: counted(pair.split.url, in_flight) == 1 + len(items), "all are sent")
        assert first.result().sources == ["transfer"]
        assert pending.result().sources == ["transfer"] * len(items)
    steps = pair.split.events("encode.begin", since_s=held_s)
    sizes = [len(each["items"]) for each in steps]
    assert sizes[0] == 1 and sum(sizes) == 1 + len(items) and max(sizes) > 1


def test_requests_at_a_full_encode_engine_are_served(pair: Pair) -> None:
    seeds = range(340, 344 + QUEUE, 4)
    contents = [[*(picture(seed + n) for n in range(4)), ASK] for seed in seeds]
    with ThreadPoolExecutor(len(contents)) as pool:
        with encoders_held(pair.split) as held_s:
            pending = [pool.submit(ask, pair.split.url, content) for content in contents]
            wait_until(
                lambda: len(pair.split.events("request.arrived", since_s=held_s)) == len(contents),
                "all have arrived",
            )
        answers = [each.result() for each in pending]
    for content, answer in zip(contents, answers, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))
    sources = [source for answer in answers for source in answer.sources]
    assert sorted(set(sources)) == ["local", "transfer"]
    assert sources.count("transfer") == QUEUE
    until_nothing_is_in_flight(pair)


def test_engine_with_waiting_requests_leaves_cores_to_others(pair: Pair) -> None:
    """Workers must not poll meanwhile, which takes the whole of a core each."""
    waits = instance(pair.split.pid, "ec_consumer")

    def rests() -> bool:
        before_s = cpu_s(waits)
        time.sleep(1)
        return cpu_s(waits) - before_s < 0.75

    with ThreadPoolExecutor() as pool:
        with encoders_held(pair.split) as since_s:
            answer = pool.submit(ask, pair.split.url, [picture(420), ASK])
            wait_until(
                lambda: bool(pair.split.events("request.arrived", since_s=since_s)), "it waits"
            )
            wait_until(rests, "the engine takes less than three quarters of a core")
            assert not answer.done()
        assert answer.result().sources == ["transfer"]
