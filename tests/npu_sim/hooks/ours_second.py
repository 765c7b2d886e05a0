"""Our classes over vllm-ascend's second model runner, made as in an engine."""

from __future__ import annotations

from vllm_ascend.worker.v2.model_runner import NPUModelRunner

from tests.npu_sim.hooks.ours import runner_class

EncodeRunner = runner_class(NPUModelRunner, second=True, is_producer=True)
PDRunner = runner_class(NPUModelRunner, second=True, is_producer=False)
