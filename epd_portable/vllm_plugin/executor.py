"""The executor of a PD instance on the CPU: vLLM's own, whose workers rest while requests wait.

``--distributed-executor-backend epd_portable.vllm_plugin.executor.EPDExecutor``. While a request
waits for an item, vLLM's engine schedules an empty step every millisecond and sends it to every
worker, which then polls for a second (``SpinCondition``, vLLM 0.26 to 0.33). Where cores are few,
polling ranks would take them from the encoder that the requests wait for.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from epd_portable.encode.two_levels import HostOrders
from epd_portable.items.placer import WorkerOrders
from epd_portable.vllm_plugin.reports import StepMetadata

_LISTS = (SchedulerOutput, CachedRequestData, StepMetadata, HostOrders, WorkerOrders)
_HINTS = frozenset({"num_common_prefix_blocks", "num_spec_tokens_to_schedule", "skip_drafts"})
"""Fields that only describe how to compute tokens; some releases of vLLM set them in empty steps.

``ci/vllm_hooks.py`` lists every field of `_LISTS`: a release with another one is reported there.
"""


def concerns_workers(output: Any) -> bool:
    """Return whether a ``SchedulerOutput``, or a field of it, holds anything for workers.

    Every field that is set counts, also of a KV connector or of later versions, except `_HINTS`.
    """
    if isinstance(output, _LISTS):
        return any(
            concerns_workers(getattr(output, each.name))
            for each in fields(output)
            if each.name not in _HINTS
        )
    return any(output) if isinstance(output, list) else bool(output)


_Executor: Any = object


class _ExecutorMixin(_Executor):
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Run one step; an empty one is not sent to the workers."""
        if concerns_workers(scheduler_output):
            return super().execute_model(scheduler_output, non_block, *args, **kwargs)
        if not non_block:
            return EMPTY_MODEL_RUNNER_OUTPUT
        done: Future[Any] = Future()
        done.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
        return done


def __getattr__(name: str) -> type:
    # Made on first access: Ascend may replace the base when its plug-in loads.
    if name != "EPDExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = importlib.import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor
    executor = type(name, (_ExecutorMixin, base), {"__module__": __name__})
    globals()[name] = executor
    return executor
