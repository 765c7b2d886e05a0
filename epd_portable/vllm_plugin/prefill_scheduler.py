"""The scheduler of a prefill+decode instance: requests that wait for items are kept out of its way.

Messages are taken in by a thread (`ItemShell`), so the engine's works on requests and the encoder
cache under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import cache
from typing import Any

from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire.params import to_params

_SLEEP_S = 0.001
"""For which vLLM's engine sleeps after a step that computed nothing (0.26 to 0.33)."""


@cache
def prefill_scheduler(base: type) -> type:
    """Return the scheduler class of a prefill+decode instance over ``EPDScheduler``."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.metrics.stats import SchedulerStats

    class PrefillScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._asleep: dict[str, Any] = {}
            self._jobs: dict[str, Any] = {}
            self._idle_since_s: float | None = None
            self._scheduled: Collection[str] = ()
            self._counts = (0, 0)
            self._told_busy: dict[int, bool] = {}  # by API server
            super().__init__(*args, **kwargs)
            self._shell = self.ec_connector.shell
            self._prefill = self.ec_connector.requests
            self._encoder = self.ec_connector.encoder
            self._shell.listen()

        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            with self._shell.lock:
                self._told_busy.setdefault(request.client_index, False)
                if self.ec_connector.job_arrived(request):
                    self._jobs[request.request_id] = request
                else:
                    super().add_request(request, *args, **kwargs)

        def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
            names = {request_ids} if isinstance(request_ids, str) else request_ids
            with self._shell.lock:
                finished = super().finish_requests(request_ids, *args, **kwargs)
                for request_id in [*self._jobs] if names is None else self._jobs.keys() & {*names}:
                    self._encoder.withdraw(request_id)
                    # vLLM ends these where it ends all: a pause or the end of the engine.
                    job = self._jobs.pop(request_id)
                    names_only = compat.version() < compat.RETURNS_REQUESTS
                    finished.append((request_id, job.client_index) if names_only else job)
                # vLLM may keep one that has finished until its KV is somewhere else.
                for request_id in [each for each, r in self._asleep.items() if r.is_finished()]:
                    del self._asleep[request_id]
                return finished

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            with self._shell.lock:
                self._shell.before_step()
                self._end_stalled()
                starts = self.pause_state == PauseState.UNPAUSED
                self._encoder.advance(waits=starts or bool(self.running))
                is_busy = bool(self._scheduled and self.running)
                self._wake(self._prefill.take_woken(is_busy=is_busy))
                self._wake(self._prefill.take_forgotten(self._asleep))
                output = super().schedule(*args, **kwargs)
                self._put_to_sleep(self._prefill.take_sleepers())
                self._scheduled = output.num_scheduled_tokens
                self._idle_since_s = None if self._scheduled else time.monotonic()
                return output

        def _end_stalled(self) -> None:
            """End the wait of a request whose items will not come, if there is one."""
            state = self.pause_state
            if state == PauseState.PAUSED_ALL:
                return
            stalled = self._prefill.find_stalled(
                computed=bool(self._scheduled), starts=state == PauseState.UNPAUSED
            )
            if stalled in self._jobs:
                self._encoder.fail(stalled, "its items have not come")
            elif stalled:
                self._prefill.end_stalled(stalled)

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

        def get_request_counts(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
            running, waiting = super().get_request_counts(*args, **kwargs)
            return running, waiting + len(self._asleep) + len(self._jobs)

        def _count_computed(self) -> tuple[int, int]:
            """Return how many requests the last step computed, and how many others there are.

            vLLM counts one that waits for its next item as running.
            """
            computed = sum(each.request_id in self._scheduled for each in self.running)
            return computed, sum(self.get_request_counts()) - computed

        def update_from_output(
            self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with self._shell.lock:
                outputs = super().update_from_output(
                    scheduler_output, model_runner_output, *args, **kwargs
                )
                self._shell.step_done()
                self._answer_jobs(outputs)
                self._tell_servers(outputs)
                self._tell_news(outputs)
                return outputs

        def _tell_servers(self, outputs: dict[int, Any]) -> None:
            """Notify each of several API servers when the engine begins or ceases to compute.

            vLLM reports the statistics of a step to one of those that have requests in it.
            """
            if len(self._told_busy) < 2:
                return
            running, waiting = self._count_computed()
            for client, told in self._told_busy.items():
                if told != (running > 0):
                    self._told_busy[client] = not told
                    one = outputs.setdefault(client, EngineCoreOutputs())
                    one.scheduler_stats = one.scheduler_stats or SchedulerStats(
                        running, waiting, kv_cache_usage=self.kv_cache_manager.usage
                    )

        def _tell_news(self, outputs: dict[int, Any]) -> None:
            """Report what a front needs to every API server of it, before the other outputs."""
            if (news := self._prefill.take_news()) is not None:
                told = EngineCoreOutput("", [])
                put_params(told, to_params(news))
                for client in self._told_busy:
                    outputs.setdefault(client, EngineCoreOutputs()).outputs.insert(0, told)

        def _answer_jobs(self, outputs: dict[int, Any]) -> None:
            """Complete encode jobs that have ended, as an encode instance does: with no token."""
            for request_id in self._encoder.take_ended():
                job = self._jobs.pop(request_id)
                answer = EngineCoreOutput(
                    request_id=request_id, new_token_ids=[], finish_reason=FinishReason.STOP
                )
                outputs.setdefault(job.client_index, EngineCoreOutputs()).outputs.append(answer)

        def make_stats(self, *args: Any, **kwargs: Any) -> Any:
            """Return nothing of a step that only waited for items, and left all as it was.

            There are hundreds a second, and an API server takes each in on a core that encodes.
            """
            counts = self._count_computed()
            more = any((*args, *kwargs.values()))
            if not self._scheduled and counts == self._counts and not more:
                return None
            self._counts = counts
            stats = super().make_stats(*args, **kwargs)
            if stats is not None:
                # vLLM 0.30 counts none of those that sleep; 0.32 counts what it skips apart.
                skipped = getattr(stats, "num_skipped_waiting_reqs", 0)
                stats.num_running_reqs, stats.num_waiting_reqs = counts[0], counts[1] - skipped
            return stats

        def set_pause_state(self, pause_state: Any, *args: Any, **kwargs: Any) -> None:
            with self._shell.lock:
                super().set_pause_state(pause_state, *args, **kwargs)
                self._shell.pause(
                    waiting=pause_state != PauseState.UNPAUSED,
                    running=pause_state == PauseState.PAUSED_ALL,
                )

        def reset_encoder_cache(self, *args: Any, **kwargs: Any) -> None:
            with self._shell.lock:
                super().reset_encoder_cache(*args, **kwargs)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
            with self._shell.lock:
                return super().reset_prefix_cache(*args, **kwargs)

        def has_requests(self, *args: Any, **kwargs: Any) -> bool:
            # To vLLM a paused engine is idle, even if requests wait: `pause` waits until it is.
            # Jobs are done until nothing runs: requests that another engine's pause waits for need
            # them.
            state = self.pause_state
            waiting = self._jobs if state == PauseState.PAUSED_NEW else self._jobs or self._asleep
            waits = bool(waiting) and state != PauseState.PAUSED_ALL
            found = bool(super().has_requests(*args, **kwargs) or waits)
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
                self._shell.rest(_SLEEP_S)

    return PrefillScheduler
