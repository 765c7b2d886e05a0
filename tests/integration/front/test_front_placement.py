"""Engines chosen by a configuration; the order of encode jobs; responses without an item."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from epd_portable.config.load import parse_topology
from tests.integration.front.played_front import Front, Make, request, settle
from tests.waiting import until_async

ENDED, FAILED = FinishReason.STOP, FinishReason.ERROR
PAGE = (Path(__file__).parents[3] / "docs/choice.md").read_text("utf-8")


def on_the_page() -> dict[str, Any]:
    """Return the first configuration of the page."""
    text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
    choice = parse_topology(text, "cpu").front.choice
    assert choice is not None
    return choice.model_dump()


def configured(*plugins: str | dict[str, Any], **profiles: dict[str, float]) -> dict[str, Any]:
    """Return a configuration of plug-ins, by type or whole, and their weights in profiles."""
    return {
        "plugins": [{"type": each} if isinstance(each, str) else each for each in plugins],
        "schedulingProfiles": [
            {
                "name": name,
                "plugins": [
                    {"pluginRef": plugin, "weight": weight} for plugin, weight in weights.items()
                ],
            }
            for name, weights in profiles.items()
        ],
    }


async def finish(front: Front, engine: str, name: str) -> None:
    """End the jobs of a request, and the request."""
    for encoder, played in front.engines.items():
        for job in played.requests.keys() & front.client._jobs.open.keys():
            await front.says(encoder, job, end=ENDED)
    await front.says(engine, name, 7, end=ENDED)


def having(front: Front, name: str) -> str:
    """Return the engine that has a request."""
    (found,) = (each for each, played in front.engines.items() if name in played.requests)
    return found


async def test_repeated_item_goes_to_the_encoder_that_had_it(make: Make) -> None:
    choice = on_the_page()
    del choice["plugins"][-2:]  # What stays is another test's.
    front = make("e-0", "e-1", "e-2", "pd-0", choice=choice)
    for number in range(6):
        for item in ("a", "b"):
            await front.ask(item, name=f"{item}{number}")
            await finish(front, "pd-0", f"{item}{number}")
    jobs = [{job.mm_features[0].identifier for job in front.jobs(f"e-{n}")} for n in range(3)]
    assert sum(map(len, jobs)) == 2
    assert front.is_empty()


@pytest.mark.parametrize(("side", "encoded"), [(4, 1), (64, 0)])
async def test_small_item_is_encoded_where_it_is_needed(
    make: Make, side: int, encoded: int
) -> None:
    choice = on_the_page()
    choice["plugins"][-2]["parameters"] = {"minImageSize": side}
    front = make("e-0", "pd-0", choice=choice)
    await front.ask("a")
    assert len(front.jobs("e-0")) == encoded
    # Where the vision tower is not, no decider is consulted.
    bare = make("e-0", "pd-0", choice=choice, can_encode=False)
    await bare.ask("a")
    assert len(bare.jobs("e-0")) == 1


async def test_engine_that_reports_a_queue_gets_less(make: Make) -> None:
    plugins = ("queue-scorer", "kv-cache-utilization-scorer")
    choice = configured(*plugins, decode={"queue-scorer": 2, "kv-cache-utilization-scorer": 1})
    front = make("pd-0", "pd-1", choice=choice)
    for name, waiting, used in (("pd-0", 5, 0.5), ("pd-1", 0, 0.1)):
        stats = SchedulerStats(num_running_reqs=1, num_waiting_reqs=waiting, kv_cache_usage=used)
        outputs = EngineCoreOutputs(outputs=[], scheduler_stats=stats)
        front.client._take_outputs(front.client.engines.by_name[name], outputs)
    for number in range(3):
        await front.ask(name=f"r{number}")
        assert having(front, f"r{number}") == "pd-1"
        await front.says("pd-1", f"r{number}", 7, end=ENDED)


async def test_job_beyond_its_time_is_another_encoders(make: Make) -> None:
    decider = {"type": "multimodal-epd-decider", "parameters": {"encoderTimeout": 500}}
    handler = {"type": "epd-profile-handler", "parameters": {"deciderPluginName": decider["type"]}}
    choice = configured(decider, handler, encode={}, decode={})
    front = make("e-0", "e-1", "pd-0", choice=choice)
    await front.ask("a")
    first = front.with_job()
    await until_async(lambda: front.jobs("e-0") and front.jobs("e-1"))
    assert front.engines[first].aborted == [front.engines[first].last.request_id]


async def test_filter_that_leaves_no_engine_is_503(make: Make) -> None:
    kind = {"type": "by-label", "parameters": {"label": "other"}}
    front = make("pd-0", choice=configured(kind, decode={"by-label": 1}))
    with pytest.raises(GracefulHTTPError) as refused:
        await front.ask()
    assert refused.value.http_status == 503
    assert front.is_empty()


async def test_decider_keeps_short_prompts_where_they_are_decoded(make: Make) -> None:
    decider = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 100}}
    handler = {
        "type": "disagg-profile-handler",
        "parameters": {"deciders": {"prefill": decider["type"]}},
    }
    front = make("p-0", "d-0", choice=configured(decider, handler, prefill={}, decode={}))
    for name, count, place in (("short", 50, "d-0"), ("long", 400, "p-0"), ("again", 400, "d-0")):
        core = request(name, "")
        core.prompt_token_ids = list(range(count))
        await front.client.add_request_async(core)
        await settle()
        job = next(iter(front.engines["p-0"].requests), "")
        assert bool(job) is (place == "p-0"), name
        if job:
            front.engines["p-0"].requests.clear()
            await front.says("p-0", job, 1, end=FinishReason.LENGTH, kv={"remote_host": "p-0"})
        await front.says("d-0", name, 7, end=ENDED)
    assert front.client.metrics.prefills.labels("local_first")._value.get() == 2
    assert front.client.metrics.prefills.labels("disaggregated")._value.get() == 1


async def test_encoder_that_failed_does_not_count_as_having_the_item(make: Make) -> None:
    scorer = "mm-embeddings-cache-scorer"
    front = make("e-0", "e-1", "pd-0", choice=configured(scorer, encode={scorer: 1}, decode={}))
    await front.ask("a")
    first = front.with_job()
    encoder = front.client.engines.by_name[first].instance
    assert "a" in encoder.cached.items
    await front.says(first, front.engines[first].last.request_id, end=FAILED)
    assert "a" not in encoder.cached.items


async def test_longer_time_than_a_retry_leaves_is_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    choice = configured("multimodal-epd-decider", decode={})
    for wanted_ms, warns in ((2_000, False), (20_000, True)):
        choice["plugins"][0]["parameters"] = {"encoderTimeout": wanted_ms}
        make("e-0", "pd-0", choice=choice)
        assert ("of encoderTimeout, 20 s, an encode job gets 15 s" in caplog.text) is warns


# The order of jobs.


async def test_jobs_run_one_after_the_other_in_order(make: Make) -> None:
    front = make("e-0", "e-1", "pd-0", encode_order="sequential")
    await front.ask("a", "b", "c")
    for each in "abc":
        (job,) = front.client._jobs.open
        name = front.with_job()
        assert front.engines[name].requests[job].mm_features[0].identifier == each
        await front.says(name, job, end=ENDED)
    await front.ends()
    assert front.items() == {"encoded": 3}


@pytest.mark.parametrize(("order", "most"), [("concurrent", 3), ("sequential_fallback", 1)])
async def test_failed_jobs_run_again_in_the_order_set(make: Make, order: str, most: int) -> None:
    front = make("e-0", "e-1", "pd-0", encode_order=order, max_queued_items=9)
    await front.ask("a", "b", "c")
    first = {job: name for name in ("e-0", "e-1") for job in front.engines[name].requests}
    assert len(first) == 3
    for job, name in first.items():
        await front.says(name, job, end=FAILED)
    done = 0
    while again := [*front.client._jobs.open]:
        assert len(again) == min(most, 3 - done)
        name = "e-1" if first_of(first, again[0]) == "e-0" else "e-0"
        await front.says(name, again[0], end=ENDED)
        done += 1
    await front.ends()
    assert front.items() == {"retried": 3}


def first_of(first: dict[str, str], job: str) -> str:
    transfer = job.partition("-")[0]
    return next(name for each, name in first.items() if each.startswith(transfer))


async def test_request_that_ends_leaves_no_job_in_turn(make: Make) -> None:
    front = make("e-0", "pd-0", encode_order="sequential")
    await front.ask("a", "b")
    await front.client.abort_requests_async(["r"])
    await settle()
    assert len(front.jobs("e-0")) == 1 and front.is_empty()


# Without an item.


def partial(make: Make, *names: str) -> Front:
    front = make(*names, can_encode=False, partial_results=True)
    front.client.words = lambda text: [len(text)] * 3
    return front


async def test_item_that_no_engine_encodes_is_left_out(make: Make) -> None:
    front = partial(make, "e-0", "pd-0")
    await front.ask("a", "b", "a")
    lost, _ = front.jobs("e-0")
    await front.says("e-0", lost.request_id, end=FAILED)
    sent = front.engines["pd-0"].last
    assert sent.request_id == "r-1"
    assert [each.identifier for each in sent.mm_features] == ["b"]
    words = [len("[image not available]")] * 3
    assert sent.prompt_token_ids == [0, *words, 5, 6, 7, 8, 9, 10, *words, 15, 16]
    assert sent.mm_features[0].mm_position.offset == 5
    await front.encoded()
    await front.says("pd-0", "r-1", 7, end=ENDED)
    assert await front.answers() == [("r", [7], ENDED)]
    assert front.items() == {"left_out": 1, "encoded": 1}
    assert front.is_empty()


async def test_request_is_served_without_all_its_items(make: Make) -> None:
    front = partial(make, "e-0", "pd-0")
    await front.ask("a", "b", "c", name="lost")
    for number in range(2):
        await front.says("e-0", front.jobs("e-0")[-1].request_id, end=FAILED)
        if number == 0:
            front.goes("e-0")
            await settle()
    sent = front.engines["pd-0"].last
    assert sent.mm_features is None
    await front.says("pd-0", sent.request_id, 7, end=ENDED)
    await front.ask("a", name="none")
    assert front.engines["pd-0"].last.mm_features is None
    await front.says("pd-0", "none", 7, end=ENDED)
    assert [each[0] for each in await front.answers()] == ["lost", "none"]
    assert front.is_empty()


async def test_every_item_may_fail_by_itself(make: Make) -> None:
    front = partial(make, "e-0", "pd-0")
    await front.ask("a", "b")
    for _ in range(2):
        (job, *_) = (
            each for each in front.jobs("e-0") if each.request_id in front.client._jobs.open
        )
        await front.says("e-0", job.request_id, end=FAILED)
    sent = front.engines["pd-0"].last
    assert sent.mm_features is None and sent.request_id == "r-2"
    await front.says("pd-0", "r-2", 7, end=ENDED)
    assert front.is_empty()
