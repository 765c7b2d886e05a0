"""What our plug-in, mixins and scheduler use of vllm-ascend, and of what it changes in vLLM.

Fields of vLLM itself are in `ci.vllm_hooks`.
"""

from __future__ import annotations

from tests.npu_sim.hooks.kinds import (
    Hook,
    attributes,
    called_by_name,
    calls,
    implements,
    order,
    provides,
    reaches,
    reads,
    serves,
    shared,
)

OURS = "tests.npu_sim.hooks.ours"
OURS_SECOND = "tests.npu_sim.hooks.ours_second"
NPU_WORKER = "vllm_ascend.worker.worker:NPUWorker"
NPU_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
SECOND_RUNNER = "vllm_ascend.worker.v2.model_runner:NPUModelRunner"
CONNECTOR_BASE = "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase"
CONNECTORS = "epd_portable.vllm_plugin.ec_connector"
QUEUES = "vllm.v1.core.sched.request_queue"
REQUEST = "vllm.v1.request:Request"
CACHES = {
    "two_levels.py": "epd_portable.encode.two_levels:TwoLevelCache",
    "encoder_cache.py": "epd_portable.items.encoder_cache:PrefillEncoderCache",
}

WORKER = (
    *calls(
        "worker.py: _WorkerMixin",
        f"{NPU_WORKER}.init_device(self)",
        f"{NPU_WORKER}.load_model(self)",
        f"{NPU_WORKER}.initialize_from_config(self, kv_cache_config)",
        f"{NPU_WORKER}.shutdown(self)",
    ),
    implements("worker.py: EPDNPUWorker", f"{OURS}:EPDNPUWorker", NPU_WORKER),
    *calls("worker.py: _WorkerMixin.init_device", "vllm.distributed.ec_transfer:get_ec_transfer()"),
    *reaches("worker.py: _WorkerMixin.init_device", NPU_WORKER, "init_device", "NPUModelRunner"),
    *reaches(
        "worker.py: _WorkerMixin.init_device",
        NPU_WORKER,
        "_init_worker_distributed_environment",
        "ensure_ec_transfer_initialized",
    ),
    *reaches("runners: execute_model", NPU_WORKER, "execute_model", "execute_model"),
    reads(
        "worker.py: _WorkerMixin.load_model",
        NPU_WORKER,
        "determine_available_memory",
        "self.model_runner.model_memory_usage",
    ),
    *calls("worker.py: _WorkerMixin.load_model", f"{NPU_RUNNER}.get_model(self)"),
    *attributes("worker.py: _WorkerMixin", NPU_WORKER, "model_runner rank"),
    *attributes(
        "worker.py: _WorkerMixin", NPU_RUNNER, "device kv_caches profile_run model_memory_usage"
    ),
)

EXECUTOR = (
    implements("executor.py: EPDExecutor", f"{OURS}:EPDExecutor", f"{OURS}:InstalledExecutor"),
    *calls(
        "executor.py: _ExecutorMixin.execute_model",
        f"{OURS}:InstalledExecutor.execute_model(self, scheduler_output, non_block=)",
    ),
    serves(
        "executor.py: EPDExecutor.execute_model",
        "vllm.v1.engine.core:EngineCore",
        "model_executor",
        f"{OURS}:EPDExecutor",
        "execute_model",
    ),
)

RUNNER = [
    hook
    for runner, mixin in (("EncodeRunner", "EncoderRunnerMixin"), ("PDRunner", "PDRunnerMixin"))
    for hook in (
        order(
            f"worker.py: {mixin} before the platform's runner",
            f"{OURS}:{runner}",
            f"{mixin} TracedRunner NPUModelRunner GPUModelRunner ECConnectorModelRunnerMixin",
        ),
        implements(f"runners: {mixin}", f"{OURS}:{runner}", NPU_RUNNER),
    )
] + [
    provides("first.py: execute_model chains to", NPU_RUNNER, "execute_model", "NPUModelRunner"),
    provides(
        "first.py: _execute_mm_encoder chains to",
        NPU_RUNNER,
        "_execute_mm_encoder",
        "GPUModelRunner",
    ),
    provides(
        "ec_connector.py: save_caches is reached by",
        NPU_RUNNER,
        "maybe_save_ec_to_connector",
        "ECConnectorModelRunnerMixin",
    ),
    *calls("first.py: execute_model", f"{NPU_RUNNER}.execute_model(self, scheduler_output)"),
    *calls(
        "first.py: _execute_mm_encoder", f"{NPU_RUNNER}._execute_mm_encoder(self, scheduler_output)"
    ),
    *reaches(
        "first.py: an encode instance's step",
        NPU_RUNNER,
        "execute_model",
        "_execute_mm_encoder",
    ),
    *reaches(
        "first.py: an encode instance's step ends after the encoder",
        NPU_RUNNER,
        "execute_model",
        "make_empty_encoder_model_runner_output",
    ),
    *reaches(
        "ec_connector.py: save_caches",
        NPU_RUNNER,
        "_execute_mm_encoder",
        "maybe_save_ec_to_connector",
    ),
    *reaches(
        "ec_connector.py: save_caches", NPU_RUNNER, "maybe_save_ec_to_connector", "save_caches"
    ),
    *attributes("first.py: TracedRunner", NPU_RUNNER, "encoder_cache requests"),
]


def scheduler(kind: str) -> list[Hook]:
    """Return what is used of their scheduler, which steps at once or is ``"Async"``."""
    caller, base = "scheduler.py: EPDScheduler", f"{OURS}:Installed{kind}Scheduler"
    return [
        order(
            "scheduler.py: what vllm-ascend put in place",
            f"{OURS}:EPD{kind}Scheduler",
            f"PrefillScheduler EPDScheduler {kind and 'AsyncScheduler'} BalanceScheduler Scheduler",
        ),
        implements(caller, f"{OURS}:EPD{kind}Scheduler", base),
        *calls(
            caller,
            f"{base}.add_request(self, request)",
            f"{base}.finish_requests(self, request_ids, finished_status)",
            f"{base}.schedule(self)",
            f"{base}.update_from_output(self, scheduler_output, model_runner_output)",
            f"{base}.reset_encoder_cache(self)",
            f"{base}.reset_prefix_cache(self)",
            f"{base}.has_requests(self)",
            f"{base}.get_request_counts(self)",
        ),
        *calls(
            "scheduler.py: EPDScheduler.__init__",
            f"{base}.__init__(self, vllm_config=, kv_cache_config=, structured_output_manager=, "
            "include_finished_set=, log_stats=, block_size=, hash_block_size=)",
        ),
        *attributes(
            caller,
            base,
            "encoder_cache_manager ec_connector grammar_compile_error_reqs requests pause_state "
            "use_eagle waiting",
        ),
        *(
            serves(
                f"{module}: {cache.partition(':')[2]}",
                base,
                "encoder_cache_manager",
                cache,
                "check_and_update_cache can_allocate allocate get_cached_input_ids "
                "free_encoder_input free get_freed_mm_hashes",
            )
            for module, cache in CACHES.items()
        ),
        *(
            serves(
                f"ec_connector.py: {half}",
                base,
                "ec_connector",
                f"{CONNECTORS}:{half}",
                "has_cache_item ensure_cache_available update_state_after_alloc "
                "build_connector_meta request_finished shutdown",
            )
            for half in ("EncodeScheduler", "PDScheduler")
        ),
        shared(base, "update_connector_output", "FEEDS_CONNECTOR_OUTPUT", once=True),
        # Taken twice it is empty the second time.
        shared(base, "take_unavailable_requests", "FAILS_UNAVAILABLE", once=False),
    ]


SCHEDULERS = (
    called_by_name(
        "scheduler.py: make_scheduler", "vllm.v1.engine.core:EngineCore.__init__", "Scheduler"
    ),
    *scheduler(""),
    *scheduler("Async"),
    *calls(
        "prefill_scheduler.py: PrefillScheduler._put_to_sleep, _wake",
        f"{QUEUES}:FCFSRequestQueue.remove_requests(self, requests)",
        f"{QUEUES}:FCFSRequestQueue.prepend_request(self, requests)",
        f"{QUEUES}:PriorityRequestQueue.remove_requests(self, requests)",
        f"{QUEUES}:PriorityRequestQueue.prepend_request(self, requests)",
    ),
    *calls(
        "prefill_scheduler.py: PrefillScheduler.finish_requests", f"{REQUEST}.is_finished(self)"
    ),
    implements(
        "encoder_scheduler.py: EncoderScheduler",
        f"{OURS}:EncoderScheduler",
        f"{OURS}:InstalledScheduler",
    ),
    order(
        "encoder_scheduler.py: what vllm-ascend put in place",
        f"{OURS}:EncoderScheduler",
        "EncoderScheduler EPDScheduler BalanceScheduler Scheduler",
    ),
    *reaches(
        "encoder_scheduler.py: EncodeQueue.may_start",
        f"{OURS}:InstalledScheduler",
        "schedule",
        "ensure_cache_available",
    ),
    *attributes(
        "encoder_scheduler.py: EncoderScheduler",
        f"{OURS}:InstalledScheduler",
        "max_num_encoder_input_tokens max_num_scheduled_tokens scheduler_config requests",
    ),
)

CONNECTING = (
    *(
        implements(f"ec_connector.py: {half}", f"{CONNECTORS}:{half}", CONNECTOR_BASE)
        for half in ("EncodeScheduler", "EncodeWorker", "PDScheduler", "PDWorker")
    ),
    *calls(
        "ec_connector.py: EPDConnector.__init__",
        f"{CONNECTOR_BASE}.__init__(self, vllm_config, role)",
    ),
    *calls(
        "ec_connector.py: WorkerConnector.end_step",
        "vllm.v1.outputs:ECConnectorOutput(finished_sending=, finished_recving=)",
    ),
    *calls("table.py: MultiModalRequest", f"{REQUEST}.get_num_encoder_embeds(self, input_id)"),
    *calls(
        "ec_connector.py: SchedulerConnector._tensor",
        "vllm.multimodal.inputs:PlaceholderRange.get_num_embeds(self)",
    ),
    *calls(
        "compat.py: encoder_output_width",
        "vllm.config.model:ModelConfig.get_inputs_embeds_size(self)",
    ),
)
HOOKS: tuple[Hook, ...] = (*WORKER, *EXECUTOR, *RUNNER, *SCHEDULERS, *CONNECTING)

SECOND: tuple[Hook, ...] = (
    *reaches("worker.py: _WorkerMixin.init_device", NPU_WORKER, "init_device", "NPUModelRunnerV2"),
    reads(
        "worker.py: _WorkerMixin.init_device", NPU_WORKER, "init_device", "self.use_v2_model_runner"
    ),
    order(
        "worker.py: a PD instance's runner",
        f"{OURS_SECOND}:PDRunner",
        "SecondRunnerMixin NPUModelRunner GPUModelRunner",
    ),
    order(
        "worker.py: an encode instance's runner, which has a language model by itself",
        f"{OURS_SECOND}:EncodeRunner",
        "SecondRunnerMixin EncodeOnlyMixin NPUModelRunner GPUModelRunner",
    ),
    implements("second.py", f"{OURS_SECOND}:PDRunner", SECOND_RUNNER),
    implements("encode_only.py", f"{OURS_SECOND}:EncodeRunner", SECOND_RUNNER),
    provides("second.py: load_model chains to", SECOND_RUNNER, "load_model", "NPUModelRunner"),
    *reaches(
        "ec_connector.py: a PD instance's step",
        SECOND_RUNNER,
        "execute_model",
        "maybe_get_output no_forward",
    ),
    # What an encode instance leaves out.
    *reaches("encode_only.py", NPU_WORKER, "get_kv_cache_spec", "get_kv_cache_spec"),
    *reaches("encode_only.py", NPU_WORKER, "initialize_from_config", "initialize_kv_cache"),
    *reaches("encode_only.py", NPU_WORKER, "compile_or_warm_up_model", "_dummy_run"),
)
"""What is used of vllm-ascend's second model runner beyond these; its oldest pair has none."""
