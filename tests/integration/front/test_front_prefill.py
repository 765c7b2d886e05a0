"""Prefill jobs of the front: who computes a prompt, and what follows a failure."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from epd_portable.front.exchange import GracefulHTTPError
from tests.integration.front.played_front import ENDED, FAILED, Front, Make, request, settle

LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT
KV = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1"}
ASKED_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


def kv_of(core: EngineCoreRequest) -> Any:
    return (core.sampling_params.extra_args or {}).get("kv_transfer_params")


def places(front: Front) -> dict[str, float]:
    """Return the counts of `epd_front_prefills_total` by place."""
    (family,) = front.client.metrics.prefills.collect()
    samples = [each for each in family.samples if each.name.endswith("_total")]
    return {each.labels["where"]: each.value for each in samples if each.value}


async def computed(front: Front, prefill: str, **kv: Any) -> None:
    """End the last job of a prefill engine."""
    job = front.engines[prefill].last.request_id
    await front.says(prefill, job, 9, end=LENGTH, kv={**KV, **kv})


async def generated(front: Front, decode: str = "d-0") -> None:
    """Check that the response of the last request is passed on, and all else is at its end."""
    sent = front.engines[decode].last.request_id
    await front.says(decode, sent, 7)
    await front.says(decode, sent, 8, end=ENDED)
    assert await front.answers() == [("r", [7], None), ("r", [8], ENDED)]
    assert not front.failed
    assert front.is_empty()


async def test_prompt_is_computed_by_the_prefill_engine(make: Make) -> None:
    front = make("p-0", "d-0")
    core = request("r", "")
    core.sampling_params = SamplingParams(max_tokens=7, min_tokens=3, logprobs=2, stop=["x"])
    await front.client.add_request_async(core)
    await settle()
    assert not front.engines["d-0"].requests
    job = front.engines["p-0"].last
    assert job.sampling_params is not None
    assert (job.sampling_params.max_tokens, job.sampling_params.logprobs) == (1, None)
    assert job.sampling_params.ignore_eos and not job.sampling_params.stop
    assert job.prompt_token_ids == core.prompt_token_ids
    assert kv_of(job) == ASKED_FOR_KV
    await computed(front, "p-0")
    sent = front.engines["d-0"].last
    assert kv_of(sent) == KV
    assert sent.sampling_params is not None
    assert (sent.sampling_params.max_tokens, sent.sampling_params.logprobs) == (7, 2)
    await generated(front)
    assert places(front) == {"disaggregated": 1}


async def test_items_go_to_the_prefill_engine_and_media_to_both(make: Make) -> None:
    front = make("e-0", "p-0", "d-0")
    await front.ask("a")
    (transfer,) = front.engines["e-0"].params["transfers"]
    (expected,) = front.engines["p-0"].params["transfers"]
    assert transfer["transfer_id"] == expected["transfer_id"]
    assert transfer["consumer"] == "tcp://p-0"
    assert set(front.engines["p-0"].last.mm_features[0].data) == {"image_grid_thw"}
    await front.encoded()
    await computed(front, "p-0")
    assert front.engines["d-0"].params is None
    assert "pixel_values" in front.engines["d-0"].last.mm_features[0].data
    await generated(front)
    assert front.items() == {"encoded": 1}


async def test_encode_prefill_engines_share_the_items_of_a_request(make: Make) -> None:
    front = make("ep-0", "ep-1", "d-0")
    await front.ask("a", "b")
    computing, encoder = sorted(
        ("ep-0", "ep-1"), key=lambda each: kv_of(front.engines[each].last) is None
    )
    (job,) = front.jobs(encoder)
    (transfer,) = job.sampling_params.extra_args["ec_transfer_params"]["transfers"]
    assert transfer["consumer"] == f"tcp://{computing}"
    having = ["pixel_values" in each.data for each in front.engines[computing].last.mm_features]
    assert having == [True, False]
    await front.says(encoder, job.request_id, end=ENDED)
    await computed(front, computing)
    await generated(front)
    assert front.items() == {"local_first": 1, "encoded": 1}


async def test_item_that_is_lost_is_encoded_by_the_prefill_engine(make: Make) -> None:
    front = make("e-0", "p-0", "p-1", "d-0")
    await front.ask("a")
    (prefill,) = (name for name in ("p-0", "p-1") if front.engines[name].requests)
    await front.says("e-0", front.engines["e-0"].last.request_id, end=FAILED)
    first, second = front.engines[prefill].requests.values()
    assert front.engines[prefill].aborted == [first.request_id]
    assert "pixel_values" in second.mm_features[0].data
    await computed(front, prefill)
    await generated(front)
    assert front.items() == {"local": 1}


async def test_decode_starts_before_late_encode_jobs_end(make: Make) -> None:
    """The prefill engine may have an item by another request's transfer."""
    front = make("e-0", "p-0", "d-0")
    await front.ask("a")
    await computed(front, "p-0")
    assert kv_of(front.engines["d-0"].last) == KV
    assert front.engines["e-0"].aborted
    await generated(front)


async def test_prompt_is_computed_where_more_than_its_kv_is_needed(make: Make) -> None:
    front = make("e-0", "p-0", "d-0")
    core = request("r", "a")
    core.sampling_params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    await front.client.add_request_async(core)
    await settle()
    assert not front.engines["p-0"].requests and not front.engines["e-0"].requests
    assert "pixel_values" in front.engines["d-0"].last.mm_features[0].data
    await generated(front)
    assert (places(front), front.items()) == ({"unsuited": 1}, {"local_first": 1})


@pytest.mark.parametrize("end", [FAILED, LENGTH], ids=["error", "no KV"])
async def test_second_prefill_engine_and_then_decode_engine_are_tried(
    make: Make, end: FinishReason
) -> None:
    front = make("p-0", "p-1", "d-0")
    await front.ask()
    tried = []
    for _ in range(2):
        (prefill,) = (
            name for name in ("p-0", "p-1") if name not in tried and front.engines[name].requests
        )
        tried.append(prefill)
        await front.says(prefill, front.engines[prefill].last.request_id, 9, end=end)
    assert [len(front.engines[name].requests) for name in ("p-0", "p-1")] == [1, 1]
    assert kv_of(front.engines["d-0"].last) is None
    await generated(front)
    assert places(front) == {"local": 1}


async def test_prefill_engine_that_goes_costs_no_response(make: Make) -> None:
    front = make("e-0", "p-0", "d-0")
    await front.ask("a")
    front.goes("p-0")
    await settle()
    sent = front.engines["d-0"].last
    assert kv_of(sent) is None and "pixel_values" in sent.mm_features[0].data
    await generated(front)
    await front.ask(name="s")
    assert front.engines["d-0"].last.request_id == "s"
    assert places(front) == {"local": 1, "unavailable": 1}


async def test_prefill_engine_that_goes_after_its_job_changes_nothing(make: Make) -> None:
    front = make("p-0", "d-0")
    await front.ask()
    await computed(front, "p-0")
    assert not front.client.engines.by_name["p-0"].instance.idle
    front.goes("p-0")
    await settle()
    assert len(front.engines["d-0"].requests) == 1
    await generated(front)


async def test_prefill_engine_is_in_use_until_the_response_begins(make: Make) -> None:
    front = make("p-0", "d-0")
    await front.ask()
    await computed(front, "p-0")
    prefill = front.client.engines.by_name["p-0"].instance
    assert (prefill.load, prefill.idle) == (0, False)
    await front.says("d-0", "r", 7)
    assert prefill.idle
    await front.says("d-0", "r", 8, end=ENDED)
    assert front.is_empty()


async def test_lost_decode_engine_is_followed_by_another_with_new_kv(make: Make) -> None:
    front = make("p-0", "d-0", "d-1")
    await front.ask()
    await computed(front, "p-0")
    (first,) = (name for name in ("d-0", "d-1") if front.engines[name].requests)
    second = {"d-0": "d-1", "d-1": "d-0"}[first]
    front.goes(first)
    await settle()
    assert len(front.engines["p-0"].requests) == 2
    await computed(front, "p-0", remote_block_ids=[[3]])
    assert kv_of(front.engines[second].last)["remote_block_ids"] == [[3]]
    await generated(front, second)


async def test_kv_is_not_sent_to_an_engine_that_prefills_itself(make: Make) -> None:
    front = make("e-0", "p-0", "d-0", "pd-0")
    front.goes("pd-0")
    await front.ask("a")
    await computed(front, "p-0")
    front.comes("pd-0")
    front.goes("d-0")
    await settle()
    assert kv_of(front.engines["pd-0"].last) is None
    assert front.engines["pd-0"].params["transfers"]
    await front.encoded()
    await generated(front, "pd-0")


async def test_abort_of_a_request_ends_its_prefill_job(make: Make) -> None:
    front = make("e-0", "p-0", "d-0")
    await front.ask("a")
    job = front.engines["p-0"].last.request_id
    await front.client.abort_requests_async(["r"])
    await settle()
    assert front.engines["p-0"].aborted == [job]
    assert front.engines["e-0"].aborted
    assert not front.engines["d-0"].requests
    assert front.is_empty()


async def test_operators_abort_of_a_prefill_job_ends_the_request(make: Make) -> None:
    """A pause with ``mode=abort`` aborts what runs."""
    front = make("p-0", "p-1", "d-0")
    await front.ask()
    (prefill,) = (name for name in ("p-0", "p-1") if front.engines[name].requests)
    await front.says(prefill, front.engines[prefill].last.request_id, end=ABORT)
    assert await front.answers() == [("r", [], ABORT)]
    assert not front.engines["d-0"].requests
    assert front.is_empty()


async def test_request_without_a_decode_engine_is_refused(make: Make) -> None:
    front = make("p-0", "d-0")
    front.goes("d-0")
    with pytest.raises(GracefulHTTPError, match="no engine that generates is up"):
        await front.ask()
    assert not front.engines["p-0"].requests


async def test_prompts_with_a_common_prefix_share_a_prefill_engine(make: Make) -> None:
    front = make("p-0", "p-1", "p-2", "d-0")
    for number in range(4):
        core = request(f"r-{number}", "")
        core.prompt_token_ids = [5] * 200
        await front.client.add_request_async(core)
        await settle()
        (prefill,) = (
            name
            for name in ("p-0", "p-1", "p-2")
            if f"r-{number}-prefill" in front.engines[name].requests
        )
        await computed(front, prefill)
        await front.says("d-0", f"r-{number}", 7, end=ENDED)
    assert sorted(len(front.engines[name].requests) for name in ("p-0", "p-1", "p-2")) == [0, 0, 4]
    assert front.is_empty()
