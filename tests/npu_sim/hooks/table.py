"""What our plug-in, mixins and scheduler use of vllm-ascend, and of what it changes in vLLM.

Fields of vLLM itself are in `ci.vllm_hooks`.
"""

from __future__ import annotations

from tests.npu_sim.hooks.kinds import (
    Attribute,
    CalledByName,
    Calls,
    Hook,
    Implements,
    Order,
    Provides,
    Reaches,
    Reads,
    Serves,
    Shared,
)

OURS = "tests.npu_sim.hooks.ours"
NPU_WORKER = "vllm_ascend.worker.worker:NPUWorker"
NPU_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
CONNECTOR_BASE = "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase"
CONNECTORS = "epd_portable.vllm_plugin.ec_connector"
CACHES = {
    "encoder_cache.py": "epd_portable.scheduling.encoder_cache:EncoderCacheManager",
    "preallocator.py": "epd_portable.scheduling.preallocator:EncoderCachePreallocator",
}
REQUEST = "vllm.v1.request:Request"

WORKER: list[Hook] = [
    Calls(
        caller="worker.py: _WorkerMixin",
        target=f"{NPU_WORKER}.{method}",
        arguments=("self", *arguments),
    )
    for method, arguments in {
        "init_device": (),
        "load_model": (),
        "initialize_from_config": ("kv_cache_config",),
        "shutdown": (),
    }.items()
] + [
    Implements(caller="worker.py: EPDNPUWorker", ours=f"{OURS}:EPDNPUWorker", base=NPU_WORKER),
    Calls(
        caller="worker.py: _WorkerMixin.init_device",
        target="vllm.distributed.ec_transfer:get_ec_transfer",
    ),
    Reaches(
        caller="worker.py: _WorkerMixin.init_device",
        owner=NPU_WORKER,
        method="init_device",
        callee="NPUModelRunner",
    ),
    Reaches(
        caller="worker.py: _WorkerMixin.init_device",
        owner=NPU_WORKER,
        method="_init_worker_distributed_environment",
        callee="ensure_ec_transfer_initialized",
    ),
    Reaches(
        caller="runners: execute_model",
        owner=NPU_WORKER,
        method="execute_model",
        callee="execute_model",
    ),
    Reads(
        caller="worker.py: _WorkerMixin.load_model",
        owner=NPU_WORKER,
        method="determine_available_memory",
        expression="self.model_runner.model_memory_usage",
    ),
    Calls(
        caller="worker.py: _WorkerMixin.load_model",
        target=f"{NPU_RUNNER}.get_model",
        arguments=("self",),
    ),
]
WORKER += [
    Attribute(caller="worker.py: _WorkerMixin", owner=owner, attribute=attribute)
    for owner, attribute in [
        (NPU_WORKER, "model_runner"),
        (NPU_WORKER, "rank"),
        (NPU_RUNNER, "device"),
        (NPU_RUNNER, "kv_caches"),
        (NPU_RUNNER, "profile_run"),
        (NPU_RUNNER, "model_memory_usage"),
    ]
]

EXECUTOR: list[Hook] = [
    Implements(
        caller="executor.py: EPDExecutor",
        ours=f"{OURS}:EPDExecutor",
        base=f"{OURS}:InstalledExecutor",
    ),
    Calls(
        caller="executor.py: _ExecutorMixin.execute_model",
        target=f"{OURS}:InstalledExecutor.execute_model",
        arguments=("self", "scheduler_output"),
        keywords=("non_block",),
    ),
    Serves(
        caller="executor.py: EPDExecutor.execute_model",
        owner="vllm.v1.engine.core:EngineCore",
        attribute="model_executor",
        ours=f"{OURS}:EPDExecutor",
        at_least=("execute_model",),
    ),
]

RUNNER: list[Hook] = []
for runner, mixin in {"EncodeRunner": "EncoderRunnerMixin", "PDRunner": "PDRunnerMixin"}.items():
    RUNNER += [
        Order(
            caller=f"worker.py: {mixin} before the platform's runner",
            owner=f"{OURS}:{runner}",
            classes=(
                mixin,
                "TracedRunner",
                "NPUModelRunner",
                "GPUModelRunner",
                "ECConnectorModelRunnerMixin",
            ),
        ),
        Implements(caller=f"runners: {mixin}", ours=f"{OURS}:{runner}", base=NPU_RUNNER),
    ]
RUNNER += [
    Provides(
        caller="first.py: execute_model chains to",
        owner=NPU_RUNNER,
        method="execute_model",
        provider="NPUModelRunner",
    ),
    Provides(
        caller="first.py: _execute_mm_encoder chains to",
        owner=NPU_RUNNER,
        method="_execute_mm_encoder",
        provider="GPUModelRunner",
    ),
    Provides(
        caller="ec_connector.py: save_caches is reached by",
        owner=NPU_RUNNER,
        method="maybe_save_ec_to_connector",
        provider="ECConnectorModelRunnerMixin",
    ),
    Calls(
        caller="first.py: execute_model",
        target=f"{NPU_RUNNER}.execute_model",
        arguments=("self", "scheduler_output"),
    ),
    Calls(
        caller="first.py: _execute_mm_encoder",
        target=f"{NPU_RUNNER}._execute_mm_encoder",
        arguments=("self", "scheduler_output"),
    ),
    Reaches(
        caller="first.py: an encode instance's step",
        owner=NPU_RUNNER,
        method="execute_model",
        callee="_execute_mm_encoder",
    ),
    Reaches(
        caller="first.py: an encode instance's step ends after the encoder",
        owner=NPU_RUNNER,
        method="execute_model",
        callee="make_empty_encoder_model_runner_output",
    ),
    Reaches(
        caller="ec_connector.py: save_caches",
        owner=NPU_RUNNER,
        method="_execute_mm_encoder",
        callee="maybe_save_ec_to_connector",
    ),
    Reaches(
        caller="ec_connector.py: save_caches",
        owner=NPU_RUNNER,
        method="maybe_save_ec_to_connector",
        callee="save_caches",
    ),
]
RUNNER += [
    Attribute(caller="host.py: RunnerHost", owner=NPU_RUNNER, attribute=attribute)
    for attribute in ("encoder_cache", "requests")
]

SCHEDULER: list[Hook] = [
    CalledByName(
        caller="scheduler.py: make_scheduler",
        source="vllm.v1.engine.core:EngineCore.__init__",
        callee="Scheduler",
    ),
    Order(
        caller="scheduler.py: what vllm-ascend put in place",
        owner=f"{OURS}:EPDScheduler",
        classes=("PrefillScheduler", "EPDScheduler", "BalanceScheduler", "Scheduler"),
    ),
    Order(
        caller="scheduler.py: what vllm-ascend put in place",
        owner=f"{OURS}:EPDAsyncScheduler",
        classes=(
            "PrefillScheduler",
            "EPDScheduler",
            "AsyncScheduler",
            "BalanceScheduler",
            "Scheduler",
        ),
    ),
]
for kind in ("", "Async"):
    base = f"{OURS}:Installed{kind}Scheduler"
    SCHEDULER += [
        Implements(
            caller="scheduler.py: EPDScheduler", ours=f"{OURS}:EPD{kind}Scheduler", base=base
        ),
        *(
            Calls(
                caller="scheduler.py: EPDScheduler",
                target=f"{base}.{method}",
                arguments=("self", *arguments),
            )
            for method, arguments in {
                "add_request": ("request",),
                "finish_requests": ("request_ids", "finished_status"),
                "schedule": (),
                "update_from_output": ("scheduler_output", "model_runner_output"),
                "reset_encoder_cache": (),
                "reset_prefix_cache": (),
                "has_requests": (),
                "get_request_counts": (),
            }.items()
        ),
        Calls(
            caller="scheduler.py: EPDScheduler.__init__",
            target=f"{base}.__init__",
            arguments=("self",),
            keywords=(
                "vllm_config",
                "kv_cache_config",
                "structured_output_manager",
                "include_finished_set",
                "log_stats",
                "block_size",
                "hash_block_size",
            ),
        ),
        *(
            Attribute(caller="scheduler.py: EPDScheduler", owner=base, attribute=attribute)
            for attribute in (
                "encoder_cache_manager",
                "ec_connector",
                "grammar_compile_error_reqs",
                "requests",
                "pause_state",
                "use_eagle",
                "waiting",
            )
        ),
        *(
            Serves(
                caller=f"{module}: {cache.partition(':')[2]}",
                owner=base,
                attribute="encoder_cache_manager",
                ours=cache,
                at_least=(
                    "check_and_update_cache",
                    "can_allocate",
                    "allocate",
                    "get_cached_input_ids",
                    "free_encoder_input",
                    "free",
                    "get_freed_mm_hashes",
                ),
            )
            for module, cache in CACHES.items()
        ),
        *(
            Serves(
                caller=f"ec_connector.py: {half}",
                owner=base,
                attribute="ec_connector",
                ours=f"{CONNECTORS}:{half}",
                at_least=(
                    "has_cache_item",
                    "ensure_cache_available",
                    "update_state_after_alloc",
                    "build_connector_meta",
                    "request_finished",
                    "shutdown",
                ),
            )
            for half in ("EncodeScheduler", "PDScheduler")
        ),
        Shared(
            caller="compat.py: FEEDS_CONNECTOR_OUTPUT",
            base=base,
            method="update_connector_output",
            since="FEEDS_CONNECTOR_OUTPUT",
            once=True,
        ),
        # Taken twice it is empty the second time.
        Shared(
            caller="compat.py: FAILS_UNAVAILABLE",
            base=base,
            method="take_unavailable_requests",
            since="FAILS_UNAVAILABLE",
            once=False,
        ),
    ]
SCHEDULER += [
    *(
        Calls(
            caller="prefill_scheduler.py: PrefillScheduler._put_to_sleep, _wake",
            target=f"vllm.v1.core.sched.request_queue:{queue}.{method}",
            arguments=("self", "requests"),
        )
        for queue in ("FCFSRequestQueue", "PriorityRequestQueue")
        for method in ("remove_requests", "prepend_request")
    ),
    Calls(
        caller="prefill_scheduler.py: PrefillScheduler.finish_requests",
        target=f"{REQUEST}.is_finished",
        arguments=("self",),
    ),
]

ENCODE_SCHEDULER: list[Hook] = [
    Implements(
        caller="encoder_scheduler.py: EncoderScheduler",
        ours=f"{OURS}:EncoderScheduler",
        base=f"{OURS}:InstalledScheduler",
    ),
    Order(
        caller="encoder_scheduler.py: what vllm-ascend put in place",
        owner=f"{OURS}:EncoderScheduler",
        classes=("EncoderScheduler", "EPDScheduler", "BalanceScheduler", "Scheduler"),
    ),
    Reaches(
        caller="encoder_scheduler.py: EncodeQueue.may_start",
        owner=f"{OURS}:InstalledScheduler",
        method="schedule",
        callee="ensure_cache_available",
    ),
    *(
        Attribute(
            caller="encoder_scheduler.py: EncoderScheduler",
            owner=f"{OURS}:InstalledScheduler",
            attribute=attribute,
        )
        for attribute in (
            "max_num_encoder_input_tokens",
            "max_num_scheduled_tokens",
            "scheduler_config",
            "requests",
        )
    ),
]

CONNECTING: list[Hook] = [
    *(
        Implements(
            caller=f"ec_connector.py: {half}", ours=f"{CONNECTORS}:{half}", base=CONNECTOR_BASE
        )
        for half in ("EncodeScheduler", "EncodeWorker", "PDScheduler", "PDWorker")
    ),
    Calls(
        caller="ec_connector.py: EPDConnector.__init__",
        target=f"{CONNECTOR_BASE}.__init__",
        arguments=("self", "vllm_config", "role"),
    ),
    Calls(
        caller="ec_connector.py: WorkerConnector.end_step",
        target="vllm.v1.outputs:ECConnectorOutput",
        keywords=("finished_sending", "finished_recving"),
    ),
    Calls(
        caller="encoder_cache.py: MultiModalRequest",
        target=f"{REQUEST}.get_num_encoder_embeds",
        arguments=("self", "input_id"),
    ),
    Calls(
        caller="ec_connector.py: SchedulerConnector._tensor",
        target="vllm.multimodal.inputs:PlaceholderRange.get_num_embeds",
        arguments=("self",),
    ),
    Calls(
        caller="compat.py: encoder_output_width",
        target="vllm.config.model:ModelConfig.get_inputs_embeds_size",
        arguments=("self",),
    ),
]
HOOKS: tuple[Hook, ...] = (*WORKER, *EXECUTOR, *RUNNER, *SCHEDULER, *ENCODE_SCHEDULER, *CONNECTING)
