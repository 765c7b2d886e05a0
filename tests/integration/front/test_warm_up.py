"""Warm-up requests of a front over played engines, at its start and when an engine comes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from prometheus_client import generate_latest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from epd_portable.front.client import SplitClient
from epd_portable.front.server import Front
from epd_portable.front.warm_up import WarmUp
from epd_portable.items.output_sample import sample_of
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire.params import FIELD, CacheNews, ItemOutcome, PrefillOutcome, to_params
from tests.integration.front.played_front import PICTURE, Engine
from tests.metrics_page import total

ENCODERS, OTHERS = ("e-0", "e-1"), ("pd-0", "pd-1")


def items(engine: Engine) -> set[str]:
    return {each.identifier for sent in engine.sent for each in sent.mm_features or ()}


async def test_each_pair_of_engines_has_an_item_of_its_own(
    client: SplitClient, front: Front
) -> None:
    engines = {name: Engine(client, name) for name in (*ENCODERS, "pd-0")}
    warm_up = WarmUp(front, client)
    await warm_up.start()
    # A third item is encoded by the engine that needs it.
    assert [len(items(each)) for each in engines.values()] == [1, 1, 3]
    engines["pd-1"] = Engine(client, "pd-1")  # It comes later, and meets both.
    await asyncio.wait(warm_up._tasks)
    pairs = itertools.product(ENCODERS, OTHERS)
    shared = [items(engines[first]) & items(engines[second]) for first, second in pairs]
    assert [len(each) for each in shared] == [1] * 4 and len(set.union(*shared)) == 4
    client.engines.by_name["e-0"].instance.seen_gone("its process has ended")
    again = Engine(client, "e-0")
    await asyncio.wait(warm_up._tasks)
    assert len(items(again) - set.union(*shared)) == 2
    assert [len(items(each)) for each in engines.values()] == [2, 2, 4, 4]


async def test_start_goes_on_when_a_warm_up_fails(
    client: SplitClient, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Engine(client, name) for name in ("e-0", "pd-0")]
    front.renderer.get_mm_processor = None
    with caplog.at_level(logging.WARNING, "epd_portable"):
        await WarmUp(front, client).start()
    assert "warm-up of e-0 and pd-0: TypeError" in caplog.text
    assert not any(each.sent for each in engines)


class SampledEngine(Engine):
    """A prefill+decode engine that reports samples of encoder outputs.

    Args:
        encoders: Engines from which it gets items.
        values: Number that is each value of an output, by the engine that encodes it.
    """

    def __init__(self, client: SplitClient, encoders: list[Engine], values: dict[str, float]):
        self._encoders, self._values = encoders, values
        super().__init__(client, "pd-0")
        for name in (*ENCODERS, "pd-0"):
            client.engines.by_name[name].fingerprint = "of all"

    async def _end(self, request_id: str) -> None:
        await asyncio.sleep(0.02)  # The item's job is sent meanwhile.
        if (encoder := self._encoder_of(request_id)) is not None:
            await encoder.may_end.wait()
        await super()._end(request_id)

    def _encoder_of(self, request_id: str) -> Engine | None:
        (request,) = (each for each in self.sent if each.request_id == request_id)
        return next((each for each in self._encoders if items_of(request) & items(each)), None)

    def says(self, request_id: str, end: FinishReason | None) -> None:
        (request,) = (each for each in self.sent if each.request_id == request_id)
        (item,) = items_of(request)
        by = getattr(self._encoder_of(request_id), "name", self.name)
        extra = request.sampling_params.extra_args or {}
        outputs = [EngineCoreOutput(request_id, [1], finish_reason=end)]
        source: Any = "local" if by == self.name else "transfer"
        outcome = ItemOutcome(mm_hash=item, source=source, encoder=by if by != self.name else "")
        put_params(outputs[0], to_params(PrefillOutcome(instance=self.name, items=(outcome,))))
        if extra.get(FIELD, {}).get("sample"):
            news = EngineCoreOutput("", [])
            sample = sample_of(torch.full((4, 8), self._values[by]))
            put_params(news, msgspec.to_builtins(CacheNews(samples={item: sample})))
            outputs.insert(0, news)
        self._client._take_outputs(self._engine, EngineCoreOutputs(outputs=outputs))


def items_of(request: EngineCoreRequest) -> set[str]:
    return {each.identifier for each in request.mm_features or ()}


async def encoder_of_a_request(front: Front, engines: list[Engine]) -> str:
    """Return the engine that encodes the item of a client's request."""
    image = Image.new("RGB", (112, 112), tuple(secrets.token_bytes(3)))
    prompt = {"prompt": PICTURE, "multi_modal_data": {"image": image}}
    name = secrets.token_hex(8)
    async for _ in front.generate(prompt, SamplingParams(), name):
        pass
    (request,) = (each for each in engines[-1].sent if each.request_id.startswith(name))
    return next((each.name for each in engines if items(each) & items_of(request)), "")


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"e-0": 1.0, "e-1": 2.0, "pd-0": 1.0}, {"e-1": "differ by 1 "}),
        ({"e-0": 1.001, "e-1": 0.999, "pd-0": 1.0}, {}),
        ({"e-0": float("nan"), "e-1": 1.0, "pd-0": 1.0}, {"e-0": "differ by 1e+06 "}),
    ],
)
async def test_engine_with_other_outputs_gets_no_items(
    client: SplitClient, front: Front, values: dict[str, float], refused: dict[str, str]
) -> None:
    encoders = [Engine(client, name) for name in ENCODERS]
    engines = [*encoders, SampledEngine(client, encoders, values)]
    await WarmUp(front, client).start()
    seen = {each["name"]: each for each in await client.engines.seen()}
    shown = {name: each["problem"] for name, each in seen.items()}
    page = generate_latest(client.metrics.registry).decode()
    for name in ENCODERS:
        gauge = total(page, f'epd_front_output_difference{{instance="{name}"')
        assert gauge == seen[name]["output_difference"]
        assert (gauge > 0.025) == (name in refused)
        assert (refused.get(name, "differ by") in shown[name]) == (name in refused)
        if name in refused:
            assert shown[name].startswith("pd-0 refuses its items: encoder outputs differ by")
            assert "(bound 0.025 for float32) from its own encoder" in shown[name]
    found = {await encoder_of_a_request(front, engines) for _ in range(24)}
    assert found == {*ENCODERS} - refused.keys()


async def test_refused_engine_is_compared_when_it_joins_again(
    client: SplitClient, front: Front
) -> None:
    values = {"e-0": 1.0, "e-1": 2.0, "pd-0": 1.0}
    encoders = [Engine(client, name) for name in ENCODERS]
    engines = [*encoders, SampledEngine(client, encoders, values)]
    warm_up = WarmUp(front, client)
    await warm_up.start()
    values["e-1"] = 1.0
    refused = client.engines.by_name["e-1"]
    refused.instance.seen_gone("its process has ended")
    engines[1] = encoders[1] = Engine(client, "e-1")
    encoders[1].may_end.clear()
    # It gets no item of a client before its first one is compared.
    assert {await encoder_of_a_request(front, engines) for _ in range(8)} == {"e-0"}
    encoders[1].may_end.set()
    await asyncio.wait(warm_up._tasks)
    assert refused.instance.health.problem == ""
    client.engines.by_name["e-0"].instance.seen_gone("its process has ended")
    assert await encoder_of_a_request(front, engines) == "e-1"


async def test_engines_are_compared_again_after_weights_change(
    client: SplitClient, front: Front
) -> None:
    values = {"e-0": 1.0, "e-1": 1.0, "pd-0": 1.0}
    encoders = [Engine(client, name) for name in ENCODERS]
    pd = SampledEngine(client, encoders, values)
    warm_up = WarmUp(front, client)
    await warm_up.start()
    values["e-1"] = 3.0  # It has missed the change.

    async def change(*methods: str) -> str:
        for method in methods:
            await client.call_utility_all_async(method)
        if warm_up._tasks:
            await asyncio.wait(warm_up._tasks)
        return client.engines.by_name["e-1"].instance.health.problem

    assert await change("reset_prefix_cache") == ""
    assert await change("pause_scheduler", "collective_rpc") == ""
    assert "differ by 2 " in await change("resume_scheduler")
    values["e-1"] = 1.0
    assert await change("collective_rpc") == ""
    assert len(items(pd)) == 9
