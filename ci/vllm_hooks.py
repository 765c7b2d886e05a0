"""What the plug-in relies on in vLLM: the one table that ``ci/hooks_diff.py`` compares by.

A test holds it against the sources: every name of vLLM that the package imports is in it, and
every row is true of the installed version. Owners and functions are named without ``vllm.``.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Relied:
    """Some names of one owner that the plug-in calls, overrides, reads or is called by.

    Attributes:
        owner: Class, module or function; of a function ``names`` is empty.
        by: Files below ``epd_portable/`` that rely on it.
        names: Methods and attributes, those of base classes included.
        reaches: Functions that a method (first word) must call, by itself or through methods of its
            own object (second word).
        implemented: Whether our class takes its place: every new method is told.
        since: First version that must have it.
        until: First version that need not have it any more.
    """

    owner: str
    by: tuple[str, ...]
    names: tuple[str, ...] = ()
    reaches: tuple[tuple[str, str], ...] = ()
    implemented: bool = False
    since: Version = (0, 0)
    until: Version = (99, 0)

    def concerns(self, version: Version) -> bool:
        """Tell whether a version must have it."""
        return self.since <= version < self.until


_SCHEDULER = ("vllm_plugin/scheduler.py",)
_ENCODER_SCHEDULER = ("vllm_plugin/encoder_scheduler.py",)
_OLDEST = ("vllm_plugin/oldest.py",)
_CONNECTOR = ("vllm_plugin/ec_connector.py",)
_COMPAT = ("vllm_plugin/compat.py",)
_EXECUTOR = ("vllm_plugin/executor.py",)
_ENCODE_ONLY = ("vllm_plugin/encode_only.py",)
_WORKER = ("vllm_plugin/worker.py",)
_BOUNDS = ("vllm_plugin/media_bounds.py",)
_FRONT = ("vllm_plugin/front.py",)
_FRONT_CLIENT = ("vllm_plugin/front_client.py",)
_FRONT_ENGINES = ("vllm_plugin/front_engines.py",)
_ENGINE_CORE = ("vllm_plugin/engine_core.py",)
_FIRST = ("runners/host.py", "runners/first.py")
_SECOND = ("runners/host.py", "runners/second.py")
_SCHEDULER_CLASS = "v1.core.sched.scheduler.Scheduler"
_RUNNER = "v1.worker.gpu_model_runner.GPUModelRunner"
_SECOND_RUNNER = "v1.worker.gpu.model_runner.GPUModelRunner"
_HOOKING = "v1.worker.gpu.ec_connector.ActiveECConnector"
_STATE = "v1.worker.gpu.model_states.default.DefaultModelState"

HOOKS: tuple[Relied, ...] = (
    # The scheduler, and what it keeps.
    Relied(
        owner=_SCHEDULER_CLASS,
        by=_SCHEDULER,
        names=(
            "__init__",
            "add_request",
            "finish_requests",
            "schedule",
            "update_from_output",
            "reset_encoder_cache",
            "reset_prefix_cache",
            "has_requests",
            "get_request_counts",
            "encoder_cache_manager",
            "kv_cache_manager",
            "ec_connector",
            "requests",
            "waiting",
            "use_eagle",
            "pause_state",
        ),
        reaches=(
            ("schedule", "check_and_update_cache"),
            ("schedule", "can_allocate"),
            ("schedule", "allocate"),
            ("schedule", "get_freed_mm_hashes"),
            ("schedule", "has_cache_item"),
            ("schedule", "ensure_cache_available"),
            ("schedule", "update_state_after_alloc"),
            ("schedule", "build_connector_meta"),
            ("update_from_output", "get_cached_input_ids"),
            ("update_from_output", "free_encoder_input"),
            ("finish_requests", "request_finished"),
        ),
    ),
    Relied(
        owner="v1.core.kv_cache_manager.KVCacheManager",
        by=_SCHEDULER,
        names=("usage",),
    ),
    Relied(
        owner="v1.core.sched.async_scheduler.AsyncScheduler", by=_SCHEDULER, names=("schedule",)
    ),
    Relied(
        owner=_SCHEDULER_CLASS,
        by=_SCHEDULER,
        names=("grammar_compile_error_reqs",),
        since=(0, 26),
        until=(0, 30),
    ),
    Relied(owner=_SCHEDULER_CLASS, by=_OLDEST, names=("_free_request",), until=(0, 26)),
    Relied(
        owner=_SCHEDULER_CLASS,
        by=_SCHEDULER,
        reaches=(("update_from_output", "take_unavailable_requests"),),
        since=(0, 30),
    ),
    Relied(
        owner=_SCHEDULER_CLASS,
        by=_SCHEDULER,
        reaches=(("update_from_output", "update_connector_output"),),
        since=(0, 28),
    ),
    Relied(owner=_SCHEDULER_CLASS, by=_SCHEDULER, names=("skipped_waiting",), until=(0, 31)),
    Relied(owner="v1.core.sched.interface.PauseState", by=_SCHEDULER, names=("UNPAUSED",)),
    Relied(
        owner=_SCHEDULER_CLASS,
        by=_ENCODER_SCHEDULER,
        names=(
            "max_num_encoder_input_tokens",
            "max_num_scheduled_tokens",
            "scheduler_config",
        ),
    ),
    Relied(owner="v1.engine.EngineCoreOutputs", by=(*_ENCODER_SCHEDULER, *_OLDEST)),
    Relied(
        owner="v1.engine.EngineCoreOutput",
        by=_OLDEST,
        names=("request_id", "new_token_ids", "finish_reason", "events", "trace_headers"),
    ),
    *(
        Relied(
            owner=f"v1.core.sched.request_queue.{queue}",
            by=_SCHEDULER,
            names=("remove_requests", "prepend_request"),
        )
        for queue in ("FCFSRequestQueue", "PriorityRequestQueue")
    ),
    Relied(
        owner="v1.core.encoder_cache_manager.EncoderCacheManager",
        by=("scheduling/encoder_cache.py", "scheduling/preallocator.py"),
        implemented=True,
        names=(
            "cache_size",
            "check_and_update_cache",
            "can_allocate",
            "allocate",
            "get_cached_input_ids",
            "free_encoder_input",
            "free",
            "get_freed_mm_hashes",
        ),
    ),
    Relied(
        owner="v1.engine.core.EngineCore",
        by=_EXECUTOR,
        names=("model_executor",),
        reaches=(("step", "execute_model"),),
    ),
    # The connector.
    Relied(
        owner="distributed.ec_transfer.ec_connector.base.ECConnectorBase",
        by=_CONNECTOR,
        implemented=True,
        names=(
            "__init__",
            "role",
            "is_producer",
            "_vllm_config",
            "bind_connector_metadata",
            "clear_connector_metadata",
            "start_load_caches",
            "save_caches",
            "get_finished",
            "has_cache_item",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished",
        ),
    ),
    Relied(owner="distributed.ec_transfer.ec_connector.base.ECConnectorMetadata", by=_CONNECTOR),
    Relied(
        owner="distributed.ec_transfer.ec_connector.base.ECConnectorRole",
        by=_CONNECTOR,
        names=("SCHEDULER", "WORKER"),
    ),
    Relied(owner="distributed.ec_transfer.get_ec_transfer", by=_WORKER),
    Relied(
        owner="distributed.ec_transfer.ec_connector.utils.PlaceholderMetadataResolver",
        by=_COMPAT,
        names=("__init__", "fields_for"),
        since=(0, 31),
    ),
    Relied(
        owner="distributed.ec_transfer.ec_connector.utils.collect_ec_item_metadata",
        by=_COMPAT,
        since=(0, 31),
    ),
    # What is read of requests and steps.
    Relied(owner="v1.request.Request", by=_CONNECTOR, names=("ec_transfer_params",), since=(0, 26)),
    Relied(owner="v1.request.Request", by=_COMPAT, names=("kv_transfer_params",)),
    Relied(
        owner="v1.request.Request",
        by=(*_CONNECTOR, "scheduling/encoder_cache.py"),
        names=(
            "request_id",
            "mm_features",
            "num_computed_tokens",
            "num_prompt_tokens",
            "status",
            "is_finished",
            "get_num_encoder_embeds",
        ),
    ),
    Relied(owner="v1.request.RequestStatus", by=_CONNECTOR, names=("RUNNING",)),
    Relied(
        owner="v1.core.sched.output.SchedulerOutput",
        by=(*_CONNECTOR, *_ENCODE_ONLY, *_EXECUTOR, "runners/host.py"),
        names=(
            "total_num_scheduled_tokens",
            "num_scheduled_tokens",
            "scheduled_encoder_inputs",
            "scheduled_new_reqs",
            "free_encoder_mm_hashes",
            "finished_req_ids",
            "ec_connector_metadata",
        ),
    ),
    Relied(
        owner="v1.core.sched.output.NewRequestData",
        by=_ENCODE_ONLY,
        names=("req_id", "mm_features"),
    ),
    Relied(owner="v1.core.sched.output.CachedRequestData", by=_EXECUTOR),
    Relied(
        owner="v1.outputs.ECConnectorOutput",
        by=_CONNECTOR,
        names=("finished_sending", "finished_recving"),
    ),
    Relied(
        owner="v1.outputs.ModelRunnerOutput",
        by=(*_ENCODE_ONLY, *_ENCODER_SCHEDULER),
        names=("req_id_to_index", "sampled_token_ids", "ec_connector_output"),
    ),
    Relied(
        owner="v1.outputs.ModelRunnerOutput",
        by=_ENCODE_ONLY,
        names=("with_ec_conn_output",),
        since=(0, 28),
    ),
    Relied(owner="v1.outputs.EMPTY_MODEL_RUNNER_OUTPUT", by=_EXECUTOR),
    Relied(owner="v1.outputs.make_empty_encoder_model_runner_output", by=_ENCODE_ONLY),
    Relied(
        owner="multimodal.inputs.MultiModalFeatureSpec",
        by=_CONNECTOR,
        names=("identifier", "modality", "mm_position"),
    ),
    Relied(
        owner="multimodal.inputs.PlaceholderRange",
        by=_CONNECTOR,
        names=("offset", "length", "get_num_embeds"),
    ),
    Relied(owner="multimodal.utils.group_and_batch_mm_kwargs", by=_COMPAT),
    Relied(owner="multimodal.MULTIMODAL_REGISTRY", by=_COMPAT),
    Relied(owner="multimodal.media.MEDIA_CONNECTOR_REGISTRY", by=_BOUNDS),
    Relied(
        owner="multimodal.media.MediaConnector",
        by=_BOUNDS,
        names=("load_from_url", "load_from_url_async"),
    ),
    Relied(owner="multimodal.media.video.VideoMediaIO", by=_BOUNDS, names=("video_loader",)),
    Relied(
        owner="multimodal.video.VideoBackend",
        by=_BOUNDS,
        names=("compute_frames_index_to_sample", "read_frames"),
        since=(0, 26),
    ),
    Relied(
        owner="multimodal.media.base.MediaIO",
        by=_BOUNDS,
        names=("load_bytes", "load_base64", "load_file"),
    ),
    # Configuration.
    Relied(
        owner="config.VllmConfig",
        by=_COMPAT,
        names=(
            "use_v2_model_runner",
            "parallel_config",
            "model_config",
            "ec_transfer_config",
            "scheduler_config",
            "lora_config",
        ),
    ),
    Relied(
        owner="config.parallel.ParallelConfig",
        by=_COMPAT,
        names=(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "world_size",
        ),
    ),
    Relied(
        owner="config.ec_transfer.ECTransferConfig",
        by=_COMPAT,
        names=("is_ec_producer", "is_ec_consumer", "ec_connector_extra_config"),
    ),
    Relied(
        owner="config.scheduler.SchedulerConfig",
        by=(*_SCHEDULER, *_ENCODER_SCHEDULER),
        names=("async_scheduling", "scheduler_cls", "enable_chunked_prefill"),
    ),
    Relied(
        owner="config.model.ModelConfig",
        by=_COMPAT,
        names=(
            "dtype",
            "hf_config",
            "is_encoder_decoder",
            "multimodal_config",
            "revision",
            "served_model_name",
            "get_inputs_embeds_size",
        ),
    ),
    *(
        Relied(owner=f"config.multimodal.{name}", by=_COMPAT, since=(0, 32))
        for name in ("ImageDummyOptions", "VideoDummyOptions")
    ),
    # The first model runner and its workers.
    Relied(
        owner=_RUNNER,
        by=_FIRST,
        names=(
            "execute_model",
            "sample_tokens",
            "_execute_mm_encoder",
            "_update_states",
            "encoder_cache",
            "requests",
            "input_batch",
            "maybe_save_ec_to_connector",
            "maybe_get_ec_connector_output",
        ),
        reaches=(
            ("execute_model", "_execute_mm_encoder"),
            ("execute_model", "_update_states"),
            ("execute_model", "make_empty_encoder_model_runner_output"),
            ("_execute_mm_encoder", "maybe_save_ec_to_connector"),
            ("maybe_save_ec_to_connector", "save_caches"),
        ),
    ),
    Relied(
        owner="v1.worker.gpu_input_batch.CachedRequestState",
        by=_FIRST,
        names=("mm_features", "generator"),
    ),
    *(
        Relied(
            owner=owner,
            by=_WORKER,
            names=("init_device", "load_model", "shutdown", "model_runner", "rank"),
        )
        for owner in ("v1.worker.gpu_worker.Worker", "v1.worker.cpu_worker.CPUWorker")
    ),
    # The second model runner.
    Relied(
        owner=_SECOND_RUNNER,
        by=_SECOND,
        names=(
            "load_model",
            "execute_model",
            "encoder_cache",
            "model_state",
            "ec_connector",
            "device",
            "lora_config",
            "kv_cache_config",
            "kv_caches",
        ),
        reaches=(("execute_model", "maybe_get_output"), ("execute_model", "no_forward")),
        since=(0, 28),
    ),
    Relied(
        owner=_HOOKING,
        by=(*_CONNECTOR, *_ENCODE_ONLY),
        names=("maybe_get_output", "no_forward"),
        reaches=(
            ("maybe_get_output", "start_load_caches"),
            ("maybe_get_output", "save_caches"),
            ("maybe_get_output", "get_finished"),
            ("no_forward", "maybe_get_output"),
        ),
        since=(0, 28),
    ),
    Relied(
        owner=_HOOKING,
        by=_CONNECTOR,
        reaches=(("maybe_get_output", "start_save_caches"),),
        since=(0, 30),
    ),
    Relied(owner=_STATE, by=_SECOND, names=("execute_mm_encoder",), since=(0, 28)),
    Relied(
        owner="v1.worker.gpu.mm.encoder_cache.EncoderCache",
        by=(*_SECOND, *_ENCODE_ONLY),
        names=(
            "mm_features",
            "encoder_outputs",
            "add_request",
            "remove_request",
            "free_encoder_cache",
        ),
        since=(0, 28),
    ),
    Relied(
        owner="v1.worker.mm_encoder_model_runner.MMEncoderModelRunner",
        by=_COMPAT,
        names=("execute_model",),
        reaches=(("execute_model", "execute_mm_encoder"), ("execute_model", "no_forward")),
        since=(0, 29),
    ),
    # The engine front, and its engines.
    Relied(
        owner="v1.engine.async_llm.AsyncLLM",
        by=_FRONT,
        names=(
            "from_vllm_config",
            "_add_request",
            "abort",
            "reset_mm_cache",
            "shutdown",
            "renderer",
            "output_processor",
        ),
        reaches=(("__init__", "make_async_mp_client"), ("_add_request", "add_request_async")),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.core_client.AsyncMPClient",
        by=(*_FRONT_CLIENT, *_FRONT_ENGINES),
        names=(
            "__init__",
            "add_request_async",
            "abort_requests_async",
            "get_output_async",
            "call_utility_async",
            "call_utility_all_async",
            "shutdown",
        ),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.core_client.EngineCoreClient",
        by=_FRONT,
        names=("make_async_mp_client",),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.core.EngineCoreProc",
        by=_ENGINE_CORE,
        names=("run_engine_core",),
        reaches=(("_perform_handshakes", "_perform_handshake"),),
        since=(0, 32),
    ),
    Relied(
        owner="renderers.base.BaseRenderer",
        by=_FRONT,
        names=("_process_mm_uuids", "start_mm_warmup_in_background"),
        reaches=(("_process_multimodal", "_process_mm_uuids"),),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.EngineCoreRequest",
        by=_FRONT_CLIENT,
        names=("request_id", "prompt_token_ids", "mm_features", "sampling_params", "resumable"),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.EngineCoreOutput",
        by=_FRONT_CLIENT,
        names=("request_id", "new_token_ids", "finish_reason", "ec_transfer_params"),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.EngineCoreOutputs",
        by=_FRONT_CLIENT,
        names=("outputs", "engine_index"),
        since=(0, 32),
    ),
    Relied(owner="v1.engine.FinishReason", by=_FRONT_CLIENT, names=("ERROR", "ABORT")),
    Relied(
        owner="multimodal.inputs.MultiModalFeatureSpec",
        by=("vllm_plugin/metadata.py",),
        names=("data", "modality", "identifier", "mm_position"),
    ),
    Relied(owner="multimodal.inputs.PlaceholderRange", by=_FRONT_CLIENT, since=(0, 32)),
    Relied(
        owner="v1.engine.utils.EngineHandshakeMetadata",
        by=_FRONT_ENGINES,
        names=("addresses", "parallel_config"),
        since=(0, 32),
    ),
    Relied(
        owner="v1.engine.utils.EngineZmqAddresses",
        by=_FRONT_ENGINES,
        names=("inputs", "outputs"),
        since=(0, 32),
    ),
    Relied(owner="v1.engine.exceptions.EngineDeadError", by=_FRONT_ENGINES, since=(0, 32)),
    Relied(
        owner="v1.executor.Executor",
        by=(*_FRONT_ENGINES, *_ENGINE_CORE),
        names=("get_class",),
        since=(0, 32),
    ),
    Relied(
        owner="engine.arg_utils.AsyncEngineArgs",
        by=(*_FRONT, *_ENGINE_CORE),
        names=("from_cli_args", "create_engine_config", "_api_process_count"),
        since=(0, 32),
    ),
    Relied(
        owner="entrypoints.launchers.api_server.entry.build_and_serve", by=_FRONT, since=(0, 32)
    ),
    Relied(owner="entrypoints.launchers.cli_args.make_arg_parser", by=_FRONT, since=(0, 32)),
    Relied(
        owner="entrypoints.launchers.cli_args.validate_parsed_serve_args",
        by=_FRONT,
        since=(0, 32),
    ),
    Relied(owner="entrypoints.launchers.launcher.setup_server", by=_FRONT, since=(0, 32)),
    Relied(
        owner="entrypoints.serve.utils.api_utils.cli_env_setup",
        by=(*_FRONT, *_ENGINE_CORE),
        since=(0, 32),
    ),
    Relied(owner="multimodal.parse.parse_mm_uuids", by=_FRONT, since=(0, 32)),
    Relied(
        owner="usage.usage_lib.UsageContext",
        by=(*_FRONT, *_ENGINE_CORE),
        names=("OPENAI_API_SERVER",),
        since=(0, 32),
    ),
    Relied(owner="sampling_params.SamplingParams", by=_FRONT_CLIENT, names=("extra_args",)),
    Relied(owner="exceptions.GracefulHTTPError", by=_FRONT_CLIENT, since=(0, 32)),
    Relied(
        owner="utils.argparse_utils.FlexibleArgumentParser",
        by=(*_FRONT, *_ENGINE_CORE),
        since=(0, 32),
    ),
)
