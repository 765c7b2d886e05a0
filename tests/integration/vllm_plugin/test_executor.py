"""Steps that the workers of a PD instance on the CPU receive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from ci.vllm_hooks import HOOKS
from epd_portable.items.placer import Placement, WorkerOrders
from epd_portable.vllm_plugin import executor
from epd_portable.vllm_plugin.reports import StepMetadata
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec


class NothingButMetadata(KVConnectorMetadata):
    """Metadata of a KV connector, whose workers look in every step for arrived blocks."""


HINTS = {"num_common_prefix_blocks", "num_spec_tokens_to_schedule", "skip_drafts"}


def waiting() -> SchedulerOutput:
    """Return what a step holds while all requests wait."""
    empty = SchedulerOutput.make_empty()
    return replace(empty, num_common_prefix_blocks=[0, 3], ec_connector_metadata=StepMetadata())


def cached(**what: Any) -> CachedRequestData:
    return replace(CachedRequestData.make_empty(), **what)


def placement() -> Placement:
    return Placement(
        mm_hash="item",
        slot=SlotDescriptor(pool="pool", offset=0, nbytes=4, generation=1),
        in_device_memory=False,
        tensor=TensorSpec(shape=(1, 1), dtype="float32"),
    )


CONCERNS: dict[str, dict[str, Any]] = {
    "a token": {"total_num_scheduled_tokens": 1, "num_scheduled_tokens": {"r": 1}},
    "a request that ended": {"finished_req_ids": {"r"}},
    "an item to forget": {"free_encoder_mm_hashes": ["item"]},
    "an item that arrived": {
        "ec_connector_metadata": StepMetadata(receipts=WorkerOrders(placements=[placement()]))
    },
    "a grant that was taken back": {
        "ec_connector_metadata": StepMetadata(receipts=WorkerOrders(revoked=[7]))
    },
    "a request that goes on": {"scheduled_cached_reqs": cached(req_ids=["r"])},
    "another connector": {"kv_connector_metadata": NothingButMetadata()},
}


@pytest.mark.parametrize("held", CONCERNS.values(), ids=CONCERNS)
def test_a_step_that_holds_something_for_workers_reaches_them(held: dict[str, Any]) -> None:
    assert executor.concerns_workers(replace(waiting(), **held))


@pytest.mark.parametrize("name", sorted(HINTS))
def test_token_hint_is_not_sent_to_workers(name: str) -> None:
    if name not in {each.name for each in fields(SchedulerOutput)}:
        pytest.skip("this version of vLLM does not give it")
    assert not executor.concerns_workers(replace(waiting(), **{name: [1]}))


def test_unknown_fields_of_a_step_reach_workers() -> None:
    assert all(
        executor.concerns_workers(replace(waiting(), **{each.name: ["something"]}))
        for each in fields(SchedulerOutput)
        if each.name not in HINTS
    )


@pytest.mark.parametrize("read", [SchedulerOutput, CachedRequestData])
def test_every_field_of_a_step_is_known(read: type[Any]) -> None:
    known = {
        name for hook in HOOKS if hook.owner.endswith(f".{read.__name__}") for name in hook.fields
    }
    assert {each.name for each in fields(read)} - known == set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """Return the steps of which vLLM's executor told its workers."""
    steps: list[SchedulerOutput] = []
    monkeypatch.setattr(
        MultiprocExecutor, "execute_model", lambda _, step, non_block: steps.append(step)
    )
    return steps


@pytest.fixture
def execute() -> Callable[..., Any]:
    """Return how an engine runs a step; no worker is started."""
    found: Any = executor.EPDExecutor.__new__(executor.EPDExecutor)
    found.shutdown = lambda: None  # vLLM's finalizer calls it.
    return found.execute_model


@pytest.mark.parametrize("non_block", [False, True])
def test_workers_are_not_called_and_the_output_is_empty(
    told: list[SchedulerOutput], execute: Callable[..., Any], non_block: bool
) -> None:
    output = execute(waiting(), non_block=non_block)
    if non_block:
        assert isinstance(output, Future)
        output = output.result(timeout=0)
    assert output.req_ids == []
    assert told == []


def test_other_steps_are_told(told: list[SchedulerOutput], execute: Callable[..., Any]) -> None:
    step = replace(waiting(), **CONCERNS["a token"])
    execute(step, non_block=True)
    assert told == [step]


def test_an_engine_finds_the_class_by_its_name() -> None:
    assert issubclass(executor.EPDExecutor, MultiprocExecutor)
    with pytest.raises(AttributeError, match="Nothing"):
        executor.Nothing  # noqa: B018
