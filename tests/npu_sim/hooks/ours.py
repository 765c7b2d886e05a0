"""Our classes over those of the installed engines, made by the code that makes them in an engine.

Importable only in a process whose platform is the NPU.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from vllm.platforms import current_platform
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from epd_portable.platforms.traits import TRAITS
from epd_portable.vllm_plugin import executor, scheduler, worker
from epd_portable.vllm_plugin.ec_connector import EncodeWorker, PDWorker
from epd_portable.vllm_plugin.encoder_scheduler import encoder_scheduler
from epd_portable.vllm_plugin.prefill_scheduler import prefill_scheduler

# What an engine does before anything else: vllm-ascend replaces classes of vLLM.
current_platform.pre_register_and_update()

EPDNPUWorker = worker.EPDNPUWorker
EPDExecutor = executor.EPDExecutor
InstalledExecutor: type = EPDExecutor.__mro__[2]
EPDScheduler = prefill_scheduler(scheduler._attached(False))
EPDAsyncScheduler = prefill_scheduler(scheduler._attached(True))
EncoderScheduler = encoder_scheduler(scheduler._attached(False))
InstalledScheduler: type = EPDScheduler.__mro__[2]
InstalledAsyncScheduler: type = EPDAsyncScheduler.__mro__[2]


def runner_class(runner: type, *, second: bool, is_producer: bool) -> type:
    """Return the runner's class as `_WorkerMixin.init_device` leaves it."""

    class ChoosesRunner:
        rank = 0
        vllm_config = mock.Mock(use_v2_model_runner=second)

        def init_device(self) -> None:
            self.model_runner: Any = runner.__new__(runner)
            self.model_runner.device = torch.device("cpu")

    made = type("Worker", (worker._WorkerMixin, ChoosesRunner), {"_traits": TRAITS["npu"]})()
    half = EncodeWorker if is_producer else PDWorker
    connector = mock.create_autospec(half, instance=True, is_producer=is_producer)
    with mock.patch.object(worker, "get_ec_transfer", lambda: connector):
        made.init_device()
    return type(made.model_runner)


EncodeRunner = runner_class(NPUModelRunner, second=False, is_producer=True)
PDRunner = runner_class(NPUModelRunner, second=False, is_producer=False)
