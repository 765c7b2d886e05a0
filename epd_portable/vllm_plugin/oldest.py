"""Parts that vLLM's scheduler lacks before 0.26.

Up to 0.25 it does not call EC connectors when a request ends, does not return their result to the
client, and cannot fail a request between steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from epd_portable.wire.params import FIELD


@cache
def completed(base: type) -> type:
    """Return ``Scheduler`` or ``AsyncScheduler`` of vLLM 0.23 to 0.25 with these abilities."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    class CompletedScheduler(base):
        def __init__(self, **kwargs: Any) -> None:
            self.grammar_compile_error_reqs: set[str] = set()
            """Requests to fail with the next output; later versions have it for grammars."""
            super().__init__(**kwargs)

        def schedule(self, throttle_prefills: bool = False) -> Any:
            return super().schedule()

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
            answer: dict[str, Any] | None = super()._free_request(request, *args, **kwargs)
            _, params = self.ec_connector.request_finished(request)
            return answer if params is None else {**(answer or {}), FIELD: params}

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            failed, self.grammar_compile_error_reqs = self.grammar_compile_error_reqs, set()
            requests = [self.requests[each] for each in failed if each in self.requests]
            if not requests:
                return outputs
            self.finish_requests(
                [each.request_id for each in requests], RequestStatus.FINISHED_ERROR
            )
            for request in requests:
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        finish_reason=request.get_finished_reason(),
                        events=request.take_events(),
                        trace_headers=request.trace_headers,
                    )
                )
            return outputs

    return CompletedScheduler
