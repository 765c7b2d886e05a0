"""A prefill+decode instance whose steps are scheduled ahead, as they are on devices by default.

vLLM's real asynchronous scheduler, a real sender and a real placer; the CPU's engine has no such
scheduling (vLLM 0.26 to 0.33). A step is executed when the next one has been scheduled, and nothing
is computed: an item that a step needs must be there then, with what was sent for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.producer import TransferOrder
from epd_portable.connector.worker_endpoint import WorkerEndpoint
from epd_portable.platforms import registry
from epd_portable.runners.placer import Placer
from epd_portable.runners.sender import Sender
from tests.integration.vllm_plugin.test_pd_scheduler import (
    DEADLINE_S,
    ITEM,
    TEXT,
    Engine,
    vllm_config,  # noqa: F401 - a fixture
)
from tests.keyring import secret_file

pytestmark = pytest.mark.needs_vllm

NAMES = ("a", "b", "c", "d", "e", "f")
SLOTS = 2


@dataclass
class Step:
    """A scheduled step.

    Attributes:
        planned: As vLLM's scheduler put it out.
        computed: Tokens of each request when it has been executed.
        samples: Requests that get a token by it.
    """

    planned: Any
    computed: dict[str, int]
    samples: set[str]


class AheadEngine(Engine):
    """Executes a step when the next has been scheduled, with the worker's part of it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        told = InstanceConfig.parse(config.ec_transfer_config.ec_connector_extra_config)
        copies = DeviceCopies(registry.get("cpu"))
        self.endpoint = WorkerEndpoint(told, copies)
        self.placer = Placer(copies, self.endpoint)
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.ahead: deque[Step] = deque()
        self.most_ahead = 0
        self.read: list[str] = []

    def turn(self) -> None:
        """Schedule a step, and execute the oldest if two are scheduled or nothing is to be done."""
        planned = self.scheduler.schedule()
        self.encoded += [(name, 0) for name in planned.scheduled_encoder_inputs]
        computed = {
            name: self.scheduler.requests[name].num_computed_tokens
            for name in planned.num_scheduled_tokens
        }
        whole = 2 * TEXT + ITEM
        samples = {name for name, count in computed.items() if count >= whole}
        self.ahead.append(Step(planned, computed, samples))
        self.most_ahead = max(self.most_ahead, len(self.ahead))
        if len(self.ahead) == 2 or not computed:
            self._execute(self.ahead.popleft())

    def _execute(self, step: Step) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        for mm_hash in step.planned.free_encoder_mm_hashes:
            self.encoder_cache.pop(mm_hash, None)
        self.placer.carry_out(step.planned.ec_connector_metadata.receipts, self.encoder_cache)
        for name, count in step.computed.items():
            begin = count - step.planned.num_scheduled_tokens[name]
            if begin < TEXT + ITEM and count > TEXT:
                values = self.encoder_cache[f"item of {name}"].unique().tolist()
                assert values == [NAMES.index(name)], "another item is in its slot"
                self.read.append(name)
        names = list(step.computed)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[1] if name in step.samples else [] for name in names],
        )
        for outputs in self.scheduler.update_from_output(step.planned, output).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)

    def spec(self, name: str) -> Any:
        """Return what the encoder puts out for the item of a request."""
        return self.scheduler.ec_connector._tensor(self.scheduler.requests[name].mm_features[0])

    def close(self) -> None:
        self.placer.close()
        self.scheduler.shutdown()
        self.endpoint.close()


@pytest.fixture
def engine(vllm_config: Any) -> Iterator[AheadEngine]:  # noqa: F811
    vllm_config.scheduler_config.async_scheduling = True
    width = vllm_config.model_config.get_inputs_embeds_size()
    extra = vllm_config.ec_transfer_config.ec_connector_extra_config
    extra["pool_bytes"] = SLOTS * ITEM * width * 4
    made = AheadEngine(vllm_config)
    yield made
    made.close()


@pytest.fixture
def sender(engine: AheadEngine) -> Iterator[Sender]:
    config = InstanceConfig(
        instance="encode-0", platform="cpu", path="shm", secret_file=secret_file()
    )
    fingerprint = engine.scheduler.ec_connector._fingerprint
    made = Sender(config, fingerprint, DeviceCopies(registry.get("cpu")))
    yield made
    made.close()


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]], ids=["in-order", "last-first"])
def test_items_are_there_in_the_step_that_reads_them_though_slots_are_fewer_than_requests(
    engine: AheadEngine, sender: Sender, order: tuple[str, ...]
) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(engine.scheduler, AsyncScheduler)
    address = engine.scheduler.ec_connector._config.control_address
    for name in NAMES:
        engine.arrive(name, pixels=True, transfer=True)
    for number, name in enumerate(order):
        spec, item = engine.spec(name), f"item of {name}"
        sender.submit(
            TransferOrder(transfer_id=f"to {name}", mm_hash=item, consumer=address, tensor=spec),
            None,
        )
        output = torch.full(spec.shape, float(NAMES.index(name)), dtype=torch.float32)
        engine.turn()
        sender.output_ready(item, output)
        if number % 2:
            time.sleep(0.01)
    end_s = time.monotonic() + DEADLINE_S
    while len(engine.ended) < len(NAMES):
        assert time.monotonic() < end_s, f"only {engine.ended} ended"
        engine.turn()
        time.sleep(0.001)
    assert engine.ended == dict.fromkeys(NAMES, "length")
    assert sorted(set(engine.read)) == sorted(NAMES)
    assert engine.encoded == []
    assert engine.most_ahead == 2
