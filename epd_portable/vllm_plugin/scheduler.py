"""The scheduler: vLLM's own, with our encoder cache and calls of our connector.

Requests that wait for their items are kept outside its queue.

``--scheduler-cls epd_portable.vllm_plugin.scheduler.make_scheduler``. A factory, because Ascend
replaces the base class when its plug-in loads, and synchronous and asynchronous scheduling have
different bases; vLLM only calls it (0.23 to 0.33).
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from epd_portable.errors import EngineError
from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.encoder_scheduler import encoder_scheduler
from epd_portable.vllm_plugin.oldest import completed
from epd_portable.wire.messages import LoadReport

_SLEEP_S = 0.001
"""For which vLLM's engine sleeps after a step that computed nothing (0.26 to 0.33)."""


def make_scheduler(**kwargs: Any) -> Any:
    """Return the scheduler for an engine; takes the arguments of vLLM's scheduler class."""
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
    if compat.version() < compat.CARRIES_PARAMS:
        base = completed(base)

    from vllm.v1.core.sched.interface import PauseState

    class EPDScheduler(base):  # type: ignore[misc,valid-type]
        """See the module."""

        encoder_cache_manager: Any

        def __init__(self, **kwargs: Any) -> None:
            self._asleep: dict[str, Any] = {}
            self._idle_since_s: float | None = None
            super().__init__(**kwargs)
            if self.ec_connector is None or not hasattr(self.ec_connector, "attach"):
                raise EngineError(
                    "the EPD scheduler needs its connector: pass --ec-transfer-config with "
                    "ec_connector_module_path epd_portable.vllm_plugin.ec_connector"
                )
            self.encoder_cache_manager = self.ec_connector.attach(
                self.encoder_cache_manager.cache_size,
                # What a drafter reads ahead (0.30 on; before, only EAGLE did, one token).
                lookahead=getattr(self, "num_prefill_lookahead", int(self.use_eagle)),
                load=self._load,
            )

        def add_request(self, request: Any) -> None:
            with self.ec_connector.exclusive():
                super().add_request(request)
                self.ec_connector.request_arrived(request)

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            with self.ec_connector.exclusive():
                finished = super().finish_requests(*args, **kwargs)
                # vLLM may keep one that has finished until its KV is somewhere else.
                for request_id in [each for each, r in self._asleep.items() if r.is_finished()]:
                    del self._asleep[request_id]
                return finished

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            with self.ec_connector.exclusive():
                self.ec_connector.before_schedule()
                self._wake(self.ec_connector.take_woken())
                output = super().schedule(*args, **kwargs)
                self._put_to_sleep(self.ec_connector.take_sleepers())
                computes = output.total_num_scheduled_tokens > 0
                self._idle_since_s = None if computes else time.monotonic()
                return output

        def _put_to_sleep(self, request_ids: list[str]) -> None:
            """Keep requests out of the queue that wait for their items.

            vLLM looks up the prefix cache for every request in it in every step.
            """
            requests = [self.requests[request_id] for request_id in request_ids]
            # Requests with KV blocks stay where vLLM keeps those.
            asleep = [each for each in requests if not each.num_computed_tokens]
            if asleep:
                self._asleep.update((each.request_id, each) for each in asleep)
                for queue in self._queues():
                    queue.remove_requests(asleep)

        def _wake(self, request_ids: list[str]) -> None:
            for request_id in reversed(request_ids):
                request = self._asleep.pop(request_id, None)
                if request is not None:
                    self._queues()[-1].prepend_request(request)

        def _queues(self) -> list[Any]:
            # Up to 0.30 requests that were passed over have a queue of their own, looked at first.
            skipped = getattr(self, "skipped_waiting", None)
            return [self.waiting] if skipped is None else [self.waiting, skipped]

        def get_request_counts(self) -> tuple[int, int]:
            running, waiting = super().get_request_counts()
            return running, waiting + len(self._asleep)

        def _load(self) -> LoadReport:
            running, waiting = self.get_request_counts()
            # Hundredths: each step that decodes takes a little more.
            kv_used = round(self.kv_cache_manager.usage, 2)
            return LoadReport(waiting=waiting, running=running, kv_used=kv_used)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            with self.ec_connector.exclusive():
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

        def reset_encoder_cache(self) -> None:
            with self.ec_connector.exclusive():
                super().reset_encoder_cache()

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
            with self.ec_connector.exclusive():
                return super().reset_prefix_cache(*args, **kwargs)

        def has_requests(self) -> bool:
            # To vLLM a paused engine is idle, whatever waits: `pause` waits until it is.
            waiting = self._asleep and self.pause_state == PauseState.UNPAUSED
            found = bool(super().has_requests() or waiting)
            if found:
                self._rest()
            return found

        def _rest(self) -> None:
            """Wait for items in addition to vLLM's sleep, from which no item wakes it.

            After a step that computed nothing, vLLM calls `has_requests`, sleeps, calls it again,
            and then looks for new requests. This waits in the second call, once for each such step
            and no longer than vLLM slept: a new request is delayed by the one or by the other.
            """
            idle_since_s = self._idle_since_s
            if idle_since_s is not None and time.monotonic() - idle_since_s >= _SLEEP_S:
                self._idle_since_s = None
                self.ec_connector.rest(_SLEEP_S)

    return EPDScheduler
