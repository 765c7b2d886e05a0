"""The executor of a PD instance on the CPU: vLLM's own, whose workers rest while requests wait.

``--distributed-executor-backend epd_portable.vllm_plugin.executor.EPDExecutor``. While a request
waits for an item, vLLM's engine turns with a step that schedules nothing every millisecond and
tells every worker of it. A worker that was told something polls for a second (``SpinCondition``,
vLLM 0.26 to 0.33). So all ranks polled for as long as anybody waited, and where cores are few they
took them from the encoder that was waited for: requests stood still for minutes.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from epd_portable.runners.placer import WorkerOrders
from epd_portable.scheduling.two_levels import HostOrders
from epd_portable.vllm_plugin.ec_connector import StepMetadata

_LISTS = (SchedulerOutput, CachedRequestData, StepMetadata, HostOrders, WorkerOrders)
_HINTS = frozenset({"num_common_prefix_blocks", "num_spec_tokens_to_schedule"})
"""How tokens are best computed; some versions of vLLM say it of steps without any too."""


def concerns_workers(output: Any) -> bool:
    """Tell whether a step holds anything for workers: tokens, receipts, requests that ended.

    Whatever is set counts, metadata of a KV connector and what later versions add included, but
    for hints on how to compute tokens.

    Args:
        output: A ``SchedulerOutput``, or what it holds.
    """
    if isinstance(output, _LISTS):
        return any(
            concerns_workers(getattr(output, each.name))
            for each in fields(output)
            if each.name not in _HINTS
        )
    return any(output) if isinstance(output, list) else bool(output)


class _ExecutorMixin:
    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run one step; if it holds nothing for the workers they do not hear of it."""
        if concerns_workers(scheduler_output):
            return super().execute_model(scheduler_output, non_block=non_block)  # type: ignore[misc]
        if not non_block:
            return EMPTY_MODEL_RUNNER_OUTPUT
        done: Future[Any] = Future()
        done.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
        return done


def __getattr__(name: str) -> type:
    # Made when it is asked for: Ascend may replace the base when its plug-in loads.
    if name != "EPDExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = importlib.import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor
    executor = type(name, (_ExecutorMixin, base), {"__module__": __name__})
    globals()[name] = executor
    return executor
