"""The front's client over engines that the tests play: who gets what, and what is tried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from epd_portable.front.exchange import GracefulHTTPError
from epd_portable.front.request import FrontItem, OpenRequest
from epd_portable.wire.params import CacheNews
from tests.integration.front.played_front import (
    CONTROL,
    ENDED,
    FAILED,
    Front,
    Make,
    feature,
    request,
    settle,
)
from tests.metrics_page import total


async def test_pixels_go_to_the_encoder_and_metadata_to_the_pd(make: Make) -> None:
    front = make("e-0", "pd-0")
    await front.ask("a", "a")
    job, sent = front.engines["e-0"].last, front.engines["pd-0"].last
    (transfer,) = front.engines["e-0"].params["transfers"]
    (expected,) = front.engines["pd-0"].params["transfers"]
    assert job.prompt_token_ids == [1, 2, 3, 4]
    assert job.mm_features[0].mm_position.offset == 0
    assert set(job.mm_features[0].data) == {"pixel_values", "image_grid_thw"}
    assert [set(each.data) for each in sent.mm_features] == [{"image_grid_thw"}] * 2
    assert (expected["item_uuid"], expected["media"]) == ("a", False)
    assert transfer["transfer_id"] == expected["transfer_id"]
    vouched = (transfer["transfer_id"], "a", CONTROL["pd-0"])
    assert front.client.secret.sign_transfer(*vouched) == transfer["proof"]
    await front.says("e-0", job.request_id, end=ENDED)
    await front.says("pd-0", "r", 7)
    await front.says("pd-0", "r", 8, end=ENDED)
    assert await front.answers() == [("r", [7], None), ("r", [8], ENDED)]
    assert front.is_empty()


@pytest.mark.parametrize("name", ["ec_transfer_params", "kv_transfer_params"])
async def test_transfer_params_of_clients_are_dropped(make: Make, name: str) -> None:
    front = make("e-0", "pd-0")
    await front.ask(**{name: {"transfers": [], "do_remote_prefill": True}}, other=1)
    assert front.engines["pd-0"].last.sampling_params.extra_args == {"other": 1}


async def test_a_session_of_streaming_input_is_refused(make: Make) -> None:
    front = make("pd-0")
    part = request("r", "")
    part.resumable = True
    with pytest.raises(GracefulHTTPError, match="send the request as a whole") as refused:
        await front.client.add_request_async(part)
    assert refused.value.http_status == 400
    assert front.is_empty()


async def test_lost_part_is_retried_alone_then_encoded_locally(make: Make) -> None:
    front = make("e-0", "e-1", "pd-0", max_queued_items=9)
    await front.ask("C")
    lost, other = front.jobs("e-0")[0], front.jobs("e-1")[0]
    names = [each.mm_features[0].identifier for each in (lost, other)]
    assert {*names} == {"C#0-2", "C#2-5"}
    await front.says("e-1", other.request_id, end=ENDED)
    await front.says("e-0", lost.request_id, end=FAILED)
    retried = front.jobs("e-1")[1:]
    assert [each.mm_features[0].identifier for each in retried] == [names[0]]
    await front.says("e-1", retried[0].request_id, end=FAILED)
    sent = front.engines["pd-0"].last.mm_features
    assert [each.identifier for each in sent] == ["C#0-2", "C#2-5"]
    here = [each.identifier for each in sent if "pixel_values_videos" in each.data]
    assert here == [names[0]]
    page = generate_latest(front.client.metrics.registry).decode()
    counted = {
        (each, end): total(page, f'epd_front_encode_jobs_total{{instance="{each}",end="{end}"}}')
        for each in ("e-0", "e-1")
        for end in ("encoded", "error")
    }
    assert [*counted.values()] == [0, 1, 1, 1]
    assert 0 < total(page, "epd_front_encode_job_seconds_sum") < 60


async def test_parts_go_to_the_engine_that_encodes_them_soonest(make: Make) -> None:
    front = make("e-0", "e-1", "pd-0", max_queued_items=9)
    for name, seconds in (("a", 0.01), ("A", 1.0)):
        front.client.engines.pool.encode_times.observe(FrontItem(feature(name, 0)), seconds, "any")
    front.goes("e-1")
    await front.ask(*"abcdef", name="pictures")
    front.comes("e-1")
    await front.ask("A", name="video")
    assert [len(front.jobs(each)) for each in ("e-0", "e-1")] == [6, 1]
    await front.ask("B")
    last = [front.jobs(each)[-1].mm_features[0].identifier for each in ("e-0", "e-1")]
    assert last == ["B#0-1", "B#1-2"]


async def test_without_a_second_encoder_a_video_is_whole(make: Make) -> None:
    front = make("e-0", "pd-0")
    await front.ask("C")
    assert [each.mm_features[0].identifier for each in front.jobs("e-0")] == ["C"]


async def test_an_item_that_the_engine_holds_costs_no_job(make: Make) -> None:
    front = make("e-0", "pd-0")
    await front.tells("pd-0", a=True, b=True)
    await front.tells("pd-0", b=False)
    await front.ask("a", "b")
    (job,) = front.jobs("e-0")
    assert job.mm_features[0].identifier == "b"
    held, asked = front.engines["pd-0"].params["transfers"]
    assert (held["item_uuid"], held["on_demand"], held["media"]) == ("a", True, False)
    assert not asked["on_demand"]
    await front.says("e-0", job.request_id, end=ENDED)
    await front.ends()
    assert front.items() == {"encoded": 1, "not_needed": 1}


async def test_an_encoder_that_answers_gets_the_media_of_what_it_holds(make: Make) -> None:
    front = make("all-0", "all-1")
    for name in front.engines:
        await front.tells(name, a=True, b=True)
    await front.ask("a", "b")
    (own,) = (name for name, each in front.engines.items() if each.requests)
    assert front.engines[own].params is None
    await front.says(own, "r", 7, end=ENDED)
    assert front.items() == {"not_needed": 2}


async def test_engines_of_all_stages_share_images_of_a_request(make: Make) -> None:
    front = make("all-0", "all-1")
    await front.ask("a", "b", "c", "d")
    own = next(name for name, each in front.engines.items() if "r" in each.requests)
    other = ({*front.engines} - {own}).pop()
    sent, jobs = front.engines[own].last, front.jobs(other)
    having = {each.identifier: "pixel_values" in each.data for each in sent.mm_features}
    assert having == {"a": True, "b": False, "c": True, "d": False}
    assert [job.mm_features[0].identifier for job in jobs] == ["b", "d"]
    await front.says(other, jobs[0].request_id, end=ENDED)
    # The other one is lost: it is encoded where it is needed, and by nobody else.
    await front.says(other, jobs[1].request_id, end=FAILED)
    (again,) = (each for each in front.engines[own].requests if each != "r")
    sent = front.engines[own].requests[again]
    assert "pixel_values" in sent.mm_features[3].data
    assert [*front.engines[other].requests][:2] == [job.request_id for job in jobs]
    await front.says(own, again, 7, end=ENDED)
    assert await front.answers() == [("r", [7], ENDED)]
    for job in front.jobs(other)[2:]:
        await front.says(other, job.request_id, end=ENDED)
    assert front.is_empty()


async def test_generating_engine_bounds_its_jobs_for_others(make: Make) -> None:
    front = make("all-0", "all-1", max_queued_items=1)
    await front.ask("a", "b", "c", "d")
    own = next(name for name, each in front.engines.items() if "r" in each.requests)
    other = ({*front.engines} - {own}).pop()
    assert [each.mm_features[0].identifier for each in front.jobs(other)] == ["b"]


async def test_concurrent_requests_do_not_share_the_last_place(make: Make) -> None:
    front = make("e-0", "pd-0", max_queued_items=1)
    for name in "ab":
        await front.client.add_request_async(request(name, [name]))
    await settle()
    assert [each.mm_features[0].identifier for each in front.jobs("e-0")] == ["a"]
    assert front.items() == {"local": 1}
    await front.encoded()
    for name in "ab":
        await front.says("pd-0", name, 7, end=ENDED)
    assert front.is_empty()


@pytest.mark.parametrize("encoders", [["e-0", "e-1"], ["e-0"]], ids=len)
async def test_item_that_its_encoder_gives_up_is_encoded_again(
    make: Make, encoders: list[str]
) -> None:
    front = make(*encoders, "pd-0", can_encode=False)
    await front.ask("a")
    first = front.with_job()
    await front.encoded(first)
    front.engines[first].requests.clear()
    (transfer,) = front.engines["pd-0"].params["transfers"]
    await front.tells("pd-0", transfer["transfer_id"])
    second = front.with_job()
    assert (second == first) == (len(encoders) == 1)
    await front.encoded(second)
    await front.ends()
    outcome = "retried" if second != first else "encoded"
    assert front.items() == {outcome: 1}


@pytest.mark.parametrize("fits", ["e-1", ""])
async def test_encoder_whose_items_are_refused_gets_no_job(make: Make, fits: str) -> None:
    front = make("e-0", "e-1", "pd-0")
    front.client.engines.by_name["pd-0"].incompatible = {"e-0", "e-1"} - {fits}
    for number in range(4):
        await front.ask(f"item {number}", name=f"r{number}")
    jobs = {name: len(front.jobs(name)) for name in ("e-0", "e-1")}
    # The queue of an encoder in these tests has two places.
    assert jobs == {"e-0": 0, "e-1": 2 if fits else 0}
    features = [each.mm_features[0] for each in front.engines["pd-0"].requests.values()]
    with_pixels = ["pixel_values" in each.data for each in features]
    assert with_pixels == ([False, False, True, True] if fits else [True] * 4)


async def test_without_an_encoder_beside_them_it_is_refused(make: Make) -> None:
    front = make("e-0", "pd-0", can_encode=False)
    await front.ask("a", "b")
    with pytest.raises(GracefulHTTPError) as full:
        await front.ask("c", name="s")
    front.goes("e-0")
    await settle()
    with pytest.raises(GracefulHTTPError) as gone:
        await front.ask("c", name="s")
    assert (full.value.http_status, gone.value.http_status) == (429, 503)
    assert front.failed["r"].http_status == 503
    assert front.is_empty()


async def test_a_request_moves_to_the_engine_that_is_left(make: Make) -> None:
    front = make("e-0", "pd-0", "pd-1")
    await front.ask("a")
    (first,) = (name for name in CONTROL if front.engines[name].requests)
    other = next(name for name in CONTROL if name != first)
    front.goes(first)
    await settle()
    (expected,) = front.engines[other].params["transfers"]
    (transfer,) = front.engines["e-0"].params["transfers"]
    assert transfer["consumer"] == CONTROL[other]
    assert transfer["transfer_id"] == expected["transfer_id"]
    await front.encoded()
    await front.ends(other)
    assert front.is_empty()


async def test_prompts_with_a_common_prefix_share_an_engine(make: Make) -> None:
    async def ask(front: Front, name: str, *tokens: int) -> str:
        core = request(name, ())
        core.prompt_token_ids = [*tokens] * 100
        await front.client.add_request_async(core)
        await settle()
        (engine,) = (each for each in CONTROL if name in front.engines[each].requests)
        return engine

    front = make("e-0", "pd-0", "pd-1")
    for first in range(4):
        chosen = set()
        for turn in range(4):
            name = f"{first}-{turn}"
            chosen.add(engine := await ask(front, name, first))
            await front.says(engine, name, 7, end=ENDED)
        assert len(chosen) == 1
    busy = [await ask(front, f"busy-{number}", 9) for number in range(8)]
    assert {busy.count(name) for name in CONTROL} <= {3, 4, 5}


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_job_may_end_after_the_answer_has_begun(
    make: Make, in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenRequest, "job_grace_s", 100.0 if in_time else 0.0)
    front = make("e-0", "pd-0")
    await front.ask("a")
    job = front.engines["e-0"].last.request_id
    await front.says("pd-0", "r", 7)
    await front.says("pd-0", "r", 8, end=ENDED)
    if in_time:
        assert front.engines["e-0"].aborted == []
        await front.says("e-0", job, end=ENDED)
    assert front.engines["e-0"].aborted == ([] if in_time else [job])
    outcome = "encoded" if in_time else "not_needed"
    assert front.client.metrics.items.labels(outcome)._value.get() == 1
    assert front.is_empty()


async def test_a_call_of_all_engines_does_not_wait_for_one_that_goes(make: Make) -> None:
    front = make("e-0", "pd-0", "pd-1")
    front.engines["pd-1"].silent = True
    calling = asyncio.create_task(front.client.call_utility_all_async("reset"))
    await settle()
    front.goes("pd-1")
    assert await asyncio.wait_for(calling, 60) == ["pd-0 reset"]
    front.goes("pd-0")
    with pytest.raises(GracefulHTTPError, match="no engine that generates is up"):
        await front.client.call_utility_all_async("reset")
    assert front.is_empty()


def calls(front: Front) -> list[Any]:
    """Return what is called from now on, in its order."""
    found: list[Any] = []
    for each in front.engines.values():
        each.calls = found
    return found


async def test_encode_engines_pause_last_and_go_on_first(make: Make) -> None:
    front = make("e-0", "pd-0")
    found = calls(front)
    await front.client.pause_scheduler_async("wait", True)
    assert found == [
        ("pd-0", "pause_scheduler", "wait", False),
        ("e-0", "pause_scheduler", "wait", True),
        ("pd-0", "pause_scheduler", "keep", True),
    ]
    found.clear()
    await front.client.sleep_async(1, "abort")
    assert found == [
        ("pd-0", "pause_scheduler", "abort", False),
        ("e-0", "sleep", 1, "wait"),
        ("pd-0", "sleep", 1, "keep"),
    ]
    found.clear()
    await front.client.resume_scheduler_async()
    assert found == [("e-0", "resume_scheduler"), ("pd-0", "resume_scheduler")]


@pytest.mark.parametrize("method", ["add_lora", "remove_lora", "pin_lora", "list_loras"])
async def test_adapters_are_loaded_by_engines_with_a_language_model(
    make: Make, method: str
) -> None:
    front = make("e-0", "pd-0")
    found = calls(front)
    await front.client.call_utility_async(method, 1, 2)
    assert found == [("pd-0", method, 1, 2)]


async def test_jobs_name_adapters_only_where_these_change_encoders(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = LoRARequest("a", 1, "/adapters/a")
    for changes_encoders in (False, True):
        lora = LoRAConfig(enable_tower_connector_lora=changes_encoders)
        monkeypatch.setattr(config, "lora_config", lora)
        front = Front(config, tmp_path, "e-0", "pd-0")
        asked = request("r", "a")
        asked.lora_request = adapter
        await front.client.add_request_async(asked)
        await settle()
        engines = [front.engines[name].last.lora_request for name in ("e-0", "pd-0")]
        assert engines == [adapter if changes_encoders else None, adapter]


async def test_encoder_caches_are_reset_again_where_items_arrive(make: Make) -> None:
    front = make("pd-0", "e-0")
    found = calls(front)
    await front.client.reset_encoder_cache_async()
    name = "reset_encoder_cache"
    assert found == [("pd-0", name), ("e-0", name), ("pd-0", name)]


async def test_encoder_that_forgot_an_item_in_a_reset_is_asked_again(make: Make) -> None:
    front = make("e-0", "pd-0", can_encode=False)
    await front.ask("a")
    (job,) = front.jobs("e-0")
    transfer = front.engines["e-0"].params["transfers"][0]["transfer_id"]
    await front.says("e-0", job.request_id, end=ENDED)
    await front.client.reset_encoder_cache_async()
    front.engines["e-0"].requests.clear()
    await front.tells("pd-0", transfer)
    assert [each.request_id for each in front.jobs("e-0")] == [job.request_id]
    await front.says("e-0", job.request_id, end=ENDED)
    await front.says("pd-0", "r", 7, end=ENDED)
    assert not front.failed and not front.engines["pd-0"].aborted
    assert front.is_empty()


@pytest.mark.parametrize("stage", ["encoding", "answering"])
async def test_a_request_that_is_given_up_leaves_nothing(make: Make, stage: str) -> None:
    front = make("e-0", "pd-0")
    await front.ask("a")
    job = front.engines["e-0"].last.request_id
    if stage == "answering":
        await front.says("e-0", job, end=ENDED)
        await front.says("pd-0", "r", 5)
    await front.client.abort_requests_async(["r"])
    await settle()
    assert front.engines["pd-0"].aborted == ["r"]
    assert front.engines["e-0"].aborted == ([job] if stage == "encoding" else [])
    assert front.is_empty()


async def test_failed_request_is_retried_with_its_media(make: Make) -> None:
    front = make("e-0", "pd-0")
    await front.ask("a")
    await front.says("pd-0", "r", end=FAILED)
    pd = front.engines["pd-0"]
    assert "pixel_values" in pd.last.mm_features[0].data
    for _ in range(2):
        await front.says("pd-0", pd.last.request_id, end=FAILED)
    assert [*pd.requests] == ["r", "r-1"]
    assert front.client.metrics.retries._value.get() == 2
    assert front.failed["r"].http_status == 503
    assert front.is_empty()


@pytest.mark.parametrize("dies", ["pd-0", "e-0"])
async def test_request_of_a_dead_engine_gets_503_or_another_encoder(make: Make, dies: str) -> None:
    front = make("e-0", "e-1", "pd-0")
    await front.ask("a")
    lost = front.with_job() if dies == "e-0" else dies
    engine = front.engines[lost]

    async def dead(request_ids: list[str]) -> None:
        raise EngineDeadError

    engine.abort_requests_async = dead
    if dies == "pd-0":
        await front.says("pd-0", "r", 7)
    # Its client is there until its sockets are closed.
    front.client.engines.by_name[lost].instance.seen_gone("its process has ended")
    await settle()
    if dies == "pd-0":
        assert front.failed["r"].http_status == 503
    else:
        other = front.with_job()
        assert not front.failed and other != lost
        await front.encoded(other)
        await front.ends()


@pytest.mark.parametrize("can_encode", [True, False])
async def test_request_with_an_item_beyond_every_limit_gets_400(
    make: Make, can_encode: bool
) -> None:
    front = make("e-0", "pd-0", can_encode=can_encode)
    await front.ask("a")
    pd = front.engines["pd-0"]
    for _ in range(1 + can_encode):  # Its engine may encode an item that it cannot receive.
        assert "r" not in front.failed
        name = pd.last.request_id
        await front.reports("pd-0", CacheNews(refused={name: "an item is too large: send less"}))
        await front.says("pd-0", name, end=FAILED)
    error = front.failed["r"]
    assert error.http_status == 400
    assert "an item is too large: send less" in str(error)
    assert front.is_empty()


async def test_an_idle_engine_encodes_some_of_many_pictures_by_itself(make: Make) -> None:
    front = make("e-0", "pd-0", elastic_encode=True, max_queued_items=8)
    client = front.client
    pd = client.engines.by_name["pd-0"].instance
    client.engines.pool.encode_times.observe(FrontItem(feature("x", 0)), 1.0, "any")
    await front.ask(*"abcd")
    fields = [set(each.data) for each in front.engines["pd-0"].last.mm_features]
    assert fields == [{"pixel_values", "image_grid_thw"}, *[{"image_grid_thw"}] * 3]
    encoded = [each.mm_features[0].identifier for each in front.jobs("e-0")]
    assert encoded == ["b", "c", "d"]
    assert (pd.pending_encode_s, pd.responses.running) == (1.0, 1)
    # It is busy, and has an item to encode: the next are for the encoder alone.
    await front.ask("e", "f", name="s")
    assert [set(each.data) for each in front.engines["pd-0"].last.mm_features] == [
        {"image_grid_thw"}
    ] * 2
    assert pd.responses.running == 1
    for job in front.jobs("e-0"):
        await front.says("e-0", job.request_id, end=ENDED)
    assert pd.responses.running == 2
    for name in "rs":
        await front.says("pd-0", name, 7, end=ENDED)
    assert pd.pending_encode_s == 0
    assert front.is_empty()


async def test_idle_engine_encodes_first_part_of_video_that_would_wait(make: Make) -> None:
    front = make("e-0", "e-1", "pd-0", elastic_encode=True, max_queued_items=8)
    front.client.engines.pool.encode_times.observe(FrontItem(feature("A", 0)), 1.0, "any")
    first, second = (front.client.engines.by_name[name].instance for name in ("e-0", "e-1"))
    with first.encoding(3.0), second.encoding(3.0):
        await front.ask("B")
    sent = front.engines["pd-0"].last.mm_features
    assert [each.identifier for each in sent] == ["B#0-1", "B#1-2"]
    assert ["pixel_values_videos" in each.data for each in sent] == [True, False]
    (job,) = front.jobs("e-0") + front.jobs("e-1")
    assert job.mm_features[0].identifier == "B#1-2"


@pytest.mark.parametrize("reported", [1, 0])
async def test_engine_that_computes_for_another_api_server_is_not_idle(
    make: Make, reported: int
) -> None:
    front = make("e-0", "pd-0", sockets=["0", "1"], elastic_encode=True, max_queued_items=8)
    engine = front.client.engines.by_name["pd-0"]
    for count in (1 - reported, reported):
        stats = SchedulerStats(num_running_reqs=count)
        front.client._take_outputs(engine, EngineCoreOutputs(scheduler_stats=stats))
    front.client.engines.pool.encode_times.observe(FrontItem(feature("x", 0)), 1.0, "any")
    await front.ask(*"abcd")
    encoded = [each.mm_features[0].identifier for each in front.jobs("e-0")]
    assert encoded == [*("abcd" if reported else "bcd")]


@pytest.mark.parametrize(
    ("limits", "items"),
    [
        ({"max_requests": 1}, ""),
        ({"max_items": 3}, "ab"),
        ({"encode": {"max_items": 3}}, "ab"),
        ({"decode": {"max_requests": 1}}, ""),
        # Larger than the whole limit: alone.
        ({"max_items": 1}, "ab"),
    ],
)
async def test_requests_beyond_a_limit_wait_for_their_turn(
    make: Make, limits: dict[str, Any], items: str
) -> None:
    front = make("e-0", "pd-0", admission=limits, max_queued_items=9)
    await front.ask(*items, name="first")
    tasks = []
    for name, priority in (("last", 7), ("normal", 0), ("urgent", -2)):
        asked = request(name, items)
        asked.priority = priority
        tasks.append(asyncio.create_task(front.client.add_request_async(asked)))
        await settle()
    order = ["first", "urgent", "normal", "last"]
    for number, name in enumerate(order):
        assert [*front.engines["pd-0"].requests] == order[: number + 1]
        for job in [*front.client._jobs.open]:
            await front.says("e-0", job, end=ENDED)
        await front.says("pd-0", name, 7, end=ENDED)
    await asyncio.gather(*tasks)
    assert front.is_empty()


async def test_encode_limit_is_free_again_when_the_response_begins(make: Make) -> None:
    front = make("e-0", "pd-0", admission={"encode": {"max_items": 1}})
    await front.ask("a", name="first")
    second = asyncio.create_task(front.client.add_request_async(request("second", "b")))
    await settle()
    assert [*front.engines["pd-0"].requests] == ["first"]
    await front.says("pd-0", "first", 7)
    await second
    await settle()
    assert [*front.engines["pd-0"].requests] == ["first", "second"]
    front.client.give_up(["first", "second"])


async def test_request_that_leaves_while_it_waits_is_not_sent(make: Make) -> None:
    front = make("pd-0", admission={"max_requests": 1})
    await front.ask(name="first")
    waiting = [
        asyncio.create_task(front.client.add_request_async(request(name, "")))
        for name in ("aborted", "cancelled", "third")
    ]
    await settle()
    await front.client.abort_requests_async(["aborted"])
    waiting[1].cancel()
    await front.says("pd-0", "first", 7, end=ENDED)
    await waiting[2]
    await settle()
    assert [*front.engines["pd-0"].requests] == ["first", "third"]
    await front.says("pd-0", "third", 7, end=ENDED)
    assert front.is_empty()


async def test_each_api_server_has_its_part_of_a_limit(make: Make, tmp_path: Path) -> None:
    sockets = [str(tmp_path / name) for name in ("one", "two")]
    front = make("pd-0", admission={"max_requests": 4}, sockets=sockets)
    tasks = [
        asyncio.create_task(front.client.add_request_async(request(str(n), ""))) for n in range(4)
    ]
    await settle()
    assert [*front.engines["pd-0"].requests] == ["0", "1"]
    for task in tasks:
        task.cancel()
    front.client.give_up(["0", "1"])
