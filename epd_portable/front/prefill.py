"""Prefill jobs: prompts that one engine computes for another (roles prefill and decode).

A prefill job is a request of its own, for one token. Its output names the place of the prompt's KV
in ``kv_transfer_params``, which the front adds to the request of the decode engine. That engine
reads the KV and computes only the last token of the prompt. It also has the whole request with its
media, so it can prefill locally after any failure.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from epd_portable.front.engines import FrontEngine
from epd_portable.front.request import ItemJobs, OpenRequest, PrefilledKv
from epd_portable.front.spans import set_end
from epd_portable.placement.assignment import MAX_PREFILLS
from epd_portable.vllm_plugin.requests import prefill_sampling

logger = logging.getLogger(__name__)

SUFFIX = "-prefill"
"""End of a prefill job's id, after the id of the request's try."""


@dataclass(eq=False, slots=True)
class PrefillJob(OpenRequest):
    """Prefill job, as a request to its engine.

    Attributes:
        params: Place of the KV, from the engine's output.
        aborted: An operator's call has ended the job at its engine.
    """

    job_grace_s: ClassVar[float] = 0.0
    """The decode engine starts after this time."""

    params: dict[str, Any] | None = None
    aborted: bool = False

    def take_output(self, output: EngineCoreOutput) -> None:
        """Take in an output of the engine."""
        if not output.finished:
            return
        if params := output.kv_transfer_params:
            self.params = params
            self.begun = True
            self.ended.set()
        else:
            self.aborted = output.finish_reason is FinishReason.ABORT
            self.again = f"the engine ended the job with {output.finish_reason}, without KV"
        self.decide()


@dataclass(eq=False, frozen=True, slots=True)
class Prefills:
    """Prefill jobs of all open requests.

    Attributes:
        jobs: Encode jobs of these requests.
        choose: Returns the engine for a job, but none of these names.
        send: Sends a job to an engine, under an id, and its items to encode engines; returns when
            the job has ended or failed.
    """

    jobs: ItemJobs
    choose: Callable[[OpenRequest, Collection[str]], FrontEngine | None]
    send: Callable[[OpenRequest, FrontEngine, str], Awaitable[None]]

    async def compute(self, one: OpenRequest, engine_id: str) -> bool:
        """Have the prompt of a request computed, and set ``one.kv``.

        Without ``one.kv`` the decode engine computes the prompt.

        Args:
            one: Request that is to be sent to a decode engine.
            engine_id: Name of the present try.

        Returns:
            Whether the request continues: an operator's abort of the job ends the request as well.
        """
        jobs, counted = self.jobs, self.jobs.metrics.prefills
        if not suits(one.core):
            counted.labels("unsuited").inc()
            return True
        if not one.selection.disaggregates_prefill():
            counted.labels("local_first").inc()
            return True
        job = PrefillJob(core=_request(one.core), stored=one.stored, exchange=one.exchange)
        job.selection = one.selection
        failed: list[str] = []
        last: FrontEngine | None = None
        for number in range(MAX_PREFILLS):
            engine = last or self.choose(job, failed)
            if engine is None or (number and not jobs.retries.spend()):
                break
            left_here, resets = len(job.here), jobs.resets
            job_id = f"{engine_id}{SUFFIX}{number or ''}"
            if jobs.spans is None:
                await self.send(job, engine, job_id)
            else:
                with jobs.spans.job("prefill", one.core, engine.name, job.tokens) as span:
                    await self.send(job, engine, job_id)
                    end = "prefilled" if job.params else "failed"
                    set_end(span, end, failed=not job.params)
            if job.params:
                counted.labels("disaggregated").inc()
                one.kv = PrefilledKv(engine.instance, job.params)
                one.exchange.prefilled = engine.instance
                return True
            if job.aborted:
                return False
            logger.warning("request %s: prefill at %s: %s", engine_id, engine.name, job.again)
            # An item of the job may have failed, or a reset ended it: then the engine is fine.
            is_fine = resets != jobs.resets or len(job.here) > left_here
            last = engine if is_fine and engine.instance.health.usable else None
            if not is_fine:
                failed.append(engine.name)
        counted.labels("local" if job.again else "unavailable").inc()
        return True


def suits(core: EngineCoreRequest) -> bool:
    """Return whether a decode engine needs nothing of a prompt but its KV.

    Log-probabilities of the prompt are computed by the engine that generates.
    """
    params = core.sampling_params
    return (
        params is not None
        and params.prompt_logprobs is None
        and core.prompt_embeds is None
        and core.prompt_token_ids is not None
    )


def _request(core: EngineCoreRequest) -> EngineCoreRequest:
    asked = copy.copy(core)
    asked.request_id = f"{core.request_id}{SUFFIX}"
    asked.sampling_params = prefill_sampling()
    return asked
