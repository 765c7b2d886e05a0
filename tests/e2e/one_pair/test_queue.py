"""An encode instance whose queue is short: what it encodes in one step, and whom it turns away."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.asking import ask, assert_equal, body, picture, post
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair, encoders_held
from tests.e2e.engines import address, counted, cpu_s, instance, metric, token, wait_until
from tests.e2e.one_pair.limits import QUEUE
from tests.metrics_page import total
from tests.unit.media.samples import png


def refused(pair: Pair) -> float:
    return metric(pair.split.pid, "ec_producer", "epd_encode_refused_requests_total")


def until_nothing_is_held(pair: Pair) -> None:
    for name in (
        "epd_encode_queued_items",
        "epd_encode_queued_bytes",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ):
        wait_until(
            lambda name=name: metric(pair.split.pid, "ec_producer", name) == 0, f"{name} is 0"
        )


def test_an_item_in_the_cache_of_the_encode_instance_is_not_encoded_again(pair: Pair) -> None:
    url, headers = address(pair.split.pid, "ec_producer"), token(pair.split.pid, "ec_producer")
    begun = len(pair.split.encoded_by("encode"))
    for pictures in ([picture(300)], [picture(300)], [picture(301), picture(300)]):
        assert post(url, body(pictures, max_tokens=1), headers=headers).status_code == 200
    assert len(pair.split.encoded_by("encode")) == begun + 2


def test_all_items_of_a_request_are_encoded_in_one_step(pair: Pair) -> None:
    url, headers = address(pair.split.pid, "ec_producer"), token(pair.split.pid, "ec_producer")
    begun = len(pair.split.events("encode.begin"))
    with ThreadPoolExecutor() as pool:
        pending = [
            pool.submit(post, url, body(items, max_tokens=1), headers=headers)
            for items in ([picture(seed + n) for n in range(QUEUE)] for seed in (310, 320, 330))
        ]
        answers = [each.result().status_code for each in pending]
    events = pair.split.events("encode.begin")[begun:]
    assert answers.count(200) * QUEUE == sum(len(event["items"]) for event in events)
    assert all(len(event["items"]) % QUEUE == 0 for event in events)


def test_a_flooded_encode_instance_answers_429_and_every_request_is_answered_in_the_end(
    pair: Pair,
) -> None:
    before = refused(pair)
    contents = [[picture(seed), ASK] for seed in range(340, 340 + 2 * QUEUE)]
    with ThreadPoolExecutor(len(contents)) as pool:
        with encoders_held(pair.split):
            pending = [pool.submit(ask, pair.split.url, content) for content in contents]
            wait_until(lambda: refused(pair) > before, "requests are turned away")
        answers = [each.result() for each in pending]
    for content, answer in zip(contents, answers, strict=True):
        assert answer.sources == ["transfer"]
        assert_equal(answer, ask(pair.reference_url, content))
    fallbacks, url = "epd_router_fallbacks_total", pair.split.url
    assert counted(url, f'{fallbacks}{{phase="encode",failure="full",fallback="retried"}}') > 0
    assert counted(url, f'{fallbacks}{{fallback="local"}}') == 0
    until_nothing_is_held(pair)


def test_work_is_owed_from_when_it_is_sent_until_it_is_done(pair: Pair) -> None:
    def seen() -> dict[str, float]:
        page = httpx.get(f"{pair.split.url}/metrics", timeout=10, trust_env=False).text
        kinds = {"encode": "image", "prefill-decode": "text"}
        series = {f"owed {role}": f'owed_seconds{{role="{role}"' for role in kinds}
        for role, kind in kinds.items():
            series[f"came {role}"] = f'work_seconds_total{{role="{role}",modality="{kind}"'
        series["items"] = 'instance_in_flight{role="encode"'
        series["answered"] = "output_tokens_total{"
        series["prompts"] = "prefill_tokens_total{"
        return {name: total(page, f"epd_router_{line}}}") for name, line in series.items()}

    ask(pair.split.url, [picture(440), ASK])
    wait_until(lambda: seen()["items"] == 0, "it is known what both take")
    before = seen()
    computed = metric(pair.split.pid, "ec_consumer", "vllm:prompt_tokens_total")
    with ThreadPoolExecutor(QUEUE) as pool:
        with encoders_held(pair.split):
            contents = ([picture(seed), ASK] for seed in range(441, 441 + QUEUE))
            pending = [pool.submit(ask, pair.split.url, content) for content in contents]
            wait_until(lambda: seen()["items"] == QUEUE, "all are sent")
            sent = seen()
        answers = [each.result() for each in pending]
    for role in ("encode", "prefill-decode"):
        assert sent[f"came {role}"] > before[f"came {role}"]
        came_s = sent[f"came {role}"] - before[f"came {role}"]
        assert sent[f"owed {role}"] == pytest.approx(came_s, abs=0.001 * QUEUE)
    done = seen()
    assert [done["owed encode"], done["owed prefill-decode"], done["items"]] == [0, 0, 0]
    assert [done[f"came {role}"] for role in ("encode", "prefill-decode")] == [
        sent[f"came {role}"] for role in ("encode", "prefill-decode")
    ]
    assert done["answered"] - before["answered"] == sum(len(each.tokens) for each in answers)
    # What the router takes prompts for, and what the engine had of them.
    computed = metric(pair.split.pid, "ec_consumer", "vllm:prompt_tokens_total") - computed
    assert done["prompts"] - before["prompts"] == pytest.approx(computed, rel=0.3)


def test_who_asks_a_full_encode_instance_directly_hears_when_to_come_back(pair: Pair) -> None:
    url, headers = address(pair.split.pid, "ec_producer"), token(pair.split.pid, "ec_producer")
    requests = [body([picture(seed)], max_tokens=1) for seed in range(380, 380 + 2 * QUEUE)]
    turned_away = len(requests) - QUEUE
    with ThreadPoolExecutor(len(requests)) as pool:
        with encoders_held(pair.split):
            pending = [pool.submit(post, url, request, headers=headers) for request in requests]
            wait_until(
                lambda: sum(each.done() for each in pending) == turned_away, "the rest is refused"
            )
        answers = [each.result() for each in pending]
    full = [answer for answer in answers if answer.status_code == 429]
    assert len(full) == turned_away
    for answer in full:
        assert int(answer.headers["retry-after"]) >= 1
        assert f"of at most {QUEUE} items are queued" in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200
    until_nothing_is_held(pair)
    for request in requests[:2]:
        assert post(url, request, headers=headers).status_code == 200


def test_a_client_that_leaves_a_full_encode_instance_gives_its_place_back(
    pair: Pair, slow: Callable[[float], Any]
) -> None:
    url, headers = address(pair.split.pid, "ec_producer"), token(pair.split.pid, "ec_producer")
    slow(3.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/chat/completions",
            json=body([picture(400 + n) for n in range(QUEUE)], max_tokens=1),
            headers=headers,
            timeout=1.0,
            trust_env=False,
        )
    until_nothing_is_held(pair)


def test_nobody_gets_into_an_instance_without_the_token(pair: Pair) -> None:
    question = body([picture(430), ASK], max_tokens=1)
    for role in ("ec_producer", "ec_consumer"):
        url, right = address(pair.split.pid, role), token(pair.split.pid, role)
        (name,) = right
        for headers in ({}, {name: "0" * 64}, {"authorization": f"Bearer {right[name]}"}):
            answer = post(url, question, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "unauthorized"
        for path in ("/v1/models", "/version", "/docs", "/server_info"):
            assert httpx.get(f"{url}{path}", timeout=10, trust_env=False).status_code == 401
        closed = httpx.post(f"{url}/reset_prefix_cache", timeout=10, trust_env=False)
        assert closed.status_code == 401
        for path in ("/health", "/ping", "/metrics"):
            assert httpx.get(f"{url}{path}", timeout=10, trust_env=False).status_code == 200
        models = httpx.get(f"{url}/v1/models", headers=right, timeout=10, trust_env=False)
        assert models.status_code == 200
        logs = [log.read_text() for log in pair.split.log_dir.iterdir()]
        assert logs and not any(right[name] in log for log in logs)
    assert ask(pair.split.url, [picture(430), ASK]).sources == ["transfer"]


def test_a_picture_that_would_become_too_large_is_not_decoded_by_an_instance_either(
    pair: Pair,
) -> None:
    url, headers = address(pair.split.pid, "ec_producer"), token(pair.split.pid, "ec_producer")
    large = base64.b64encode(png(13_370, 13_370)).decode()
    item = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}"}}
    answer = post(url, body([item] * QUEUE, max_tokens=1), headers=headers)
    assert answer.status_code == 400
    assert "router.max_item_pixels" in answer.json()["error"]["message"]
    until_nothing_is_held(pair)


def test_an_instance_whose_requests_wait_leaves_the_cores_to_others(pair: Pair) -> None:
    """Its workers used to poll meanwhile, for the whole of a core each."""
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
            wait_until(rests, "the instance takes less than three quarters of a core")
            assert not answer.done()
        assert answer.result().sources == ["transfer"]
