"""Variables and settings of instances on vLLM's second model runner, over NIXL."""

from __future__ import annotations

ENV = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


SETTINGS = (
    "engine_args.dtype=float32",
    "engine_args.skip_mm_profiling=true",
    "transfer.path=nixl",
    "transfer.pool_bytes=16MiB",
    "transfer.lease_s=60",
    "transfer.wait_timeout_s=120",
)
