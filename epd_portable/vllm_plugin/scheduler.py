"""The scheduler: vLLM's own, with our encoder cache and three calls to the connector around it.

``--scheduler-cls epd_portable.vllm_plugin.scheduler.make_scheduler``. A factory, because Ascend
replaces the base class when its plug-in loads, and because synchronous and asynchronous scheduling
have different bases; vLLM only calls what it is given (0.26 to 0.33).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from epd_portable.errors import EngineError
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.encoder_scheduler import encoder_scheduler


def make_scheduler(**kwargs: Any) -> Any:
    """Return the scheduler for an engine.

    Args:
        **kwargs: What vLLM gives its scheduler class.
    """
    config = kwargs["vllm_config"]
    found = _scheduler_class(config.scheduler_config.async_scheduling)
    if config.ec_transfer_config.is_ec_producer:
        found = encoder_scheduler(found)
    return found(**kwargs)


@cache
def _scheduler_class(asynchronous: bool) -> type:
    if asynchronous:
        from vllm.v1.core.sched import async_scheduler

        base = async_scheduler.AsyncScheduler
    else:
        from vllm.v1.core.sched import scheduler

        base = scheduler.Scheduler

    class EPDScheduler(base):  # type: ignore[misc,valid-type]
        """See the module."""

        encoder_cache_manager: Any

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if self.ec_connector is None or not hasattr(self.ec_connector, "attach"):
                raise EngineError(
                    "the EPD scheduler needs its connector: pass --ec-transfer-config with "
                    "ec_connector_module_path epd_portable.vllm_plugin.ec_connector"
                )
            self.encoder_cache_manager = EncoderCacheManager(self.encoder_cache_manager.cache_size)
            self.ec_connector.attach(self.encoder_cache_manager)

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            self.ec_connector.request_arrived(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.ec_connector.before_schedule()
            return super().schedule(*args, **kwargs)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            if compat.version() < compat.FEEDS_CONNECTOR_OUTPUT:
                report = getattr(model_runner_output, "ec_connector_output", None)
                if report is not None:
                    self.ec_connector.update_connector_output(report)
            if compat.version() < compat.FAILS_UNAVAILABLE:
                self.grammar_compile_error_reqs.update(
                    self.ec_connector.take_unavailable_requests()
                )
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.ec_connector.step_done()
            return outputs

    return EPDScheduler
