"""The scheduler of an encode instance: all items of a request in one step.

vLLM's ``schedule`` queries the connector (``ensure_cache_available``, 0.26 to 0.33) whether a
waiting request may start; `EncodeQueue` decides.
"""

from __future__ import annotations

import time
from collections import deque
from functools import cache
from typing import Any

from epd_portable.log import trace
from epd_portable.vllm_plugin import compat


@cache
def encoder_scheduler(base: type) -> type:
    """Return the scheduler class of an encode instance over ``EPDScheduler``."""
    from vllm.v1.engine import EngineCoreOutputs

    class EncoderScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Without KV cache vLLM turns chunks off; up to 0.31 it then never schedules a prompt
            # longer than a step. Nothing is generated here, so a chunk harms nothing.
            self.scheduler_config.enable_chunked_prefill = True
            self.encode_queue = self.ec_connector.queue
            self._withheld: deque[tuple[int, int, Any]] = deque()
            """Responses with their steps and clients, in their order."""

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.encode_queue.admit(time.monotonic())
            output = super().schedule(*args, **kwargs)
            self.encode_queue.scheduled(output.num_scheduled_tokens)
            return output

        def update_from_output(
            self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if compat.version() < compat.ENDS_ENCODED:
                self._drop_early_tokens(model_runner_output)
            outputs = super().update_from_output(
                scheduler_output, model_runner_output, *args, **kwargs
            )
            return self._withhold(scheduler_output.ec_connector_metadata.step, outputs)

        def _withhold(self, step: int, outputs: dict[int, Any]) -> dict[int, Any]:
            """Hold responses until their items are computed: on devices a step only queues them.

            vLLM's other outputs go out at once.
            """
            for client, each in outputs.items():
                self._withheld.extend((step, client, answer) for answer in each.outputs)
                each.outputs = []
            while self._withheld and self._withheld[0][0] <= self.ec_connector.computed_step:
                _, client, answer = self._withheld.popleft()
                outputs.setdefault(client, EngineCoreOutputs()).outputs.append(answer)
                trace("encode.finished", request=answer.request_id)
            return outputs

        def has_requests(self, *args: Any, **kwargs: Any) -> bool:
            return super().has_requests(*args, **kwargs) or bool(self._withheld)

        def _drop_early_tokens(self, model_runner_output: Any) -> None:
            """Keep requests whose prompts take several steps from ending with the first."""
            for request_id, index in model_runner_output.req_id_to_index.items():
                request = self.requests.get(request_id)
                if request and request.num_computed_tokens < request.num_prompt_tokens:
                    model_runner_output.sampled_token_ids[index] = []

    return EncoderScheduler
