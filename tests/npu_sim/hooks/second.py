"""Every hook of vllm-ascend's second model runner that our code uses beyond those of vLLM's."""

from __future__ import annotations

from tests.npu_sim.hooks.kinds import Hook, Implements, Order, Provides, Reaches, Reads
from tests.npu_sim.hooks.table import NPU_WORKER

OURS = "tests.npu_sim.hooks.ours_second"
SECOND_RUNNER = "vllm_ascend.worker.v2.model_runner:NPUModelRunner"

SECOND: tuple[Hook, ...] = (
    Reaches(
        caller="worker.py: _WorkerMixin.init_device",
        owner=NPU_WORKER,
        method="init_device",
        callee="NPUModelRunnerV2",
    ),
    Reads(
        caller="worker.py: _WorkerMixin.init_device",
        owner=NPU_WORKER,
        method="init_device",
        expression="self.use_v2_model_runner",
    ),
    Order(
        caller="worker.py: a PD instance's runner",
        owner=f"{OURS}:PDRunner",
        classes=("SecondRunnerMixin", "NPUModelRunner", "GPUModelRunner"),
    ),
    Order(
        caller="worker.py: an encode instance's runner, which has a language model by itself",
        owner=f"{OURS}:EncodeRunner",
        classes=("SecondRunnerMixin", "EncodeOnlyMixin", "NPUModelRunner", "GPUModelRunner"),
    ),
    Implements(caller="second.py", ours=f"{OURS}:PDRunner", base=SECOND_RUNNER),
    Implements(caller="encode_only.py", ours=f"{OURS}:EncodeRunner", base=SECOND_RUNNER),
    Provides(
        caller="second.py: load_model chains to",
        owner=SECOND_RUNNER,
        method="load_model",
        provider="NPUModelRunner",
    ),
    *(
        Reaches(
            caller="ec_connector.py: a PD instance's step",
            owner=SECOND_RUNNER,
            method="execute_model",
            callee=callee,
        )
        for callee in ("maybe_get_output", "no_forward")
    ),
    # What an encode instance leaves out.
    *(
        Reaches(caller="encode_only.py", owner=NPU_WORKER, method=method, callee=callee)
        for method, callee in {
            "get_kv_cache_spec": "get_kv_cache_spec",
            "initialize_from_config": "initialize_kv_cache",
            "compile_or_warm_up_model": "_dummy_run",
        }.items()
    ),
)
