"""The scheduler: vLLM's own, with our encoder cache and calls of our connector.

``--scheduler-cls epd_portable.vllm_plugin.scheduler.make_scheduler``. A factory, because Ascend
replaces the base class when its plug-in loads, and synchronous and asynchronous scheduling have
different bases; vLLM only calls it (0.23 to 0.33).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.encoder_scheduler import encoder_scheduler
from epd_portable.vllm_plugin.oldest import completed
from epd_portable.vllm_plugin.prefill_scheduler import prefill_scheduler


def make_scheduler(**kwargs: Any) -> Any:
    """Return the scheduler for an engine; takes the arguments of vLLM's scheduler class."""
    return scheduler_class(kwargs["vllm_config"])(**kwargs)


def scheduler_class(vllm_config: Any) -> type:
    """Return the scheduler's class for an engine's role and kind of scheduling."""
    base = _attached(vllm_config.scheduler_config.async_scheduling)
    encodes = vllm_config.ec_transfer_config.is_ec_producer
    return (encoder_scheduler if encodes else prefill_scheduler)(base)


@cache
def _attached(asynchronous: bool) -> type:
    """Return vLLM's scheduler with what both roles need of it in all versions."""
    if asynchronous:
        from vllm.v1.core.sched import async_scheduler

        base = async_scheduler.AsyncScheduler
    else:
        from vllm.v1.core.sched import scheduler

        base = scheduler.Scheduler
    if compat.version() < compat.CARRIES_PARAMS:
        base = completed(base)

    class EPDScheduler(base):  # type: ignore[misc,valid-type]
        encoder_cache_manager: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.encoder_cache_manager = self.ec_connector.attach(self)

        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super().add_request(request, *args, **kwargs)
            self.ec_connector.request_arrived(request)

        def reset_encoder_cache(self, *args: Any, **kwargs: Any) -> None:
            super().reset_encoder_cache(*args, **kwargs)
            self.ec_connector.reset()

        def update_from_output(
            self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if compat.version() < compat.FEEDS_CONNECTOR_OUTPUT:
                report = getattr(model_runner_output, "ec_connector_output", None)
                if report is not None:
                    self.ec_connector.update_connector_output(report)
            if compat.version() < compat.FAILS_UNAVAILABLE:
                unavailable = self.ec_connector.take_unavailable_requests()
                self.grammar_compile_error_reqs.update(unavailable)
            return super().update_from_output(
                scheduler_output, model_runner_output, *args, **kwargs
            )

    return EPDScheduler
