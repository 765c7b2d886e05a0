"""Parts of vLLM that the plug-in uses: the one table that ``ci/hooks_diff.py`` compares by.

A test holds it against the sources: every name of vLLM that the package imports is in it, and
every row is true of the installed version. Owners and functions are named without ``vllm.``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Version = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Relied:
    """Some names of one owner that the plug-in calls, overrides, reads or is called by.

    Attributes:
        owner: Class, module or function; of a function ``names`` is empty.
        by: Files below ``epd_portable/`` that rely on it.
        names: Methods and attributes, those of base classes included.
        reaches: Functions that a method (first word) must call, directly or through methods of its
            own object (second word).
        implemented: Whether our class takes its place: every new method is reported.
        fields: Fields of a dataclass that is read as a whole, those of all releases: a field that
            is not among them must be followed. Empty where only ``names`` are read.
        since: First version that must have it.
        until: First version that need not have it any more.
    """

    owner: str
    by: tuple[str, ...]
    names: tuple[str, ...] = ()
    reaches: tuple[tuple[str, str], ...] = ()
    implemented: bool = False
    fields: tuple[str, ...] = ()
    since: Version = (0, 0)
    until: Version = (99, 0)

    def concerns(self, version: Version) -> bool:
        """Return whether a version must have it."""
        return self.since <= version < self.until


def _row(
    owner: str,
    by: tuple[str, ...],
    names: str = "",
    reaches: Sequence[str] = (),
    fields: str = "",
    **more: Any,
) -> Relied:
    """Return a row; names and fields are separated by spaces, callees stand behind their method."""
    pairs = [each.partition(": ") for each in reaches]
    return Relied(
        owner=owner,
        by=by,
        names=tuple(names.split()),
        fields=tuple(fields.split()),
        reaches=tuple((method, callee) for method, _, all_ in pairs for callee in all_.split()),
        **more,
    )


_SCHEDULER = ("vllm_plugin/scheduler.py",)
_PREFILL_SCHEDULER = ("vllm_plugin/prefill_scheduler.py",)
_ENCODER_SCHEDULER = ("vllm_plugin/encoder_scheduler.py",)
_OLDEST = ("vllm_plugin/oldest.py",)
_CONNECTOR = ("vllm_plugin/ec_connector.py",)
_ITEMS = ("vllm_plugin/requests.py",)
_COMPAT = ("vllm_plugin/compat.py",)
_EXECUTOR = ("vllm_plugin/executor.py",)
_ENCODE_ONLY = ("vllm_plugin/encode_only.py",)
_WORKER = ("vllm_plugin/worker.py",)
_OVERLAP = ("vllm_plugin/overlap.py",)
_BOUNDS = ("vllm_plugin/media_bounds.py",)
_FRONT = ("front/server.py",)
_FRONT_URLS = ("front/media_urls.py",)
_FRONT_CLIENT = ("front/client.py",)
_VIDEO_PARTS = ("vllm_plugin/video_parts.py",)
_FRONT_ENGINES = ("front/engines.py",)
_JOB_ITEMS = ("vllm_plugin/job_items.py",)
_HUB = ("engine/hub.py", "engine/remote.py")
_ENGINE_CORE = ("engine/core.py",)
_FIRST = ("runners/first.py", "runners/generators.py")
_SECOND = ("runners/second.py",)
_SCHEDULER_CLASS = "v1.core.sched.scheduler.Scheduler"
_RUNNER = "v1.worker.gpu_model_runner.GPUModelRunner"
_SECOND_RUNNER = "v1.worker.gpu.model_runner.GPUModelRunner"
_HOOKING = "v1.worker.gpu.ec_connector.ActiveECConnector"
_STATE = "v1.worker.gpu.model_states.default.DefaultModelState"
_FILMS = "multimodal.video.VideoBackend"
_OPENCV = "multimodal.video_decoders.opencv.OpenCVVideoBackendMixin"

HOOKS: tuple[Relied, ...] = (
    # The scheduler, and what it keeps.
    _row(
        _SCHEDULER_CLASS,
        (*_SCHEDULER, *_PREFILL_SCHEDULER),
        "__init__ add_request finish_requests schedule update_from_output reset_encoder_cache "
        "reset_prefix_cache set_pause_state has_requests get_request_counts make_stats "
        "encoder_cache_manager "
        "kv_cache_manager ec_connector requests waiting use_eagle pause_state",
        reaches=[
            "schedule: check_and_update_cache can_allocate allocate get_freed_mm_hashes "
            "has_cache_item ensure_cache_available update_state_after_alloc "
            "build_connector_meta",
            "update_from_output: get_cached_input_ids free_encoder_input",
            "finish_requests: request_finished",
        ],
    ),
    _row("v1.core.kv_cache_manager.KVCacheManager", _PREFILL_SCHEDULER, "usage"),
    _row("v1.core.sched.async_scheduler.AsyncScheduler", _SCHEDULER, "schedule"),
    _row(_SCHEDULER_CLASS, _SCHEDULER, "grammar_compile_error_reqs", since=(0, 26), until=(0, 30)),
    _row(_SCHEDULER_CLASS, _OLDEST, "_free_request", until=(0, 26)),
    _row(
        _SCHEDULER_CLASS,
        _SCHEDULER,
        reaches=["update_from_output: take_unavailable_requests"],
        since=(0, 30),
    ),
    _row(
        _SCHEDULER_CLASS,
        _SCHEDULER,
        reaches=["update_from_output: update_connector_output"],
        since=(0, 28),
    ),
    _row(_SCHEDULER_CLASS, _PREFILL_SCHEDULER, "skipped_waiting", until=(0, 31)),
    _row("v1.core.sched.interface.PauseState", _PREFILL_SCHEDULER, "UNPAUSED"),
    _row(
        _SCHEDULER_CLASS,
        (*_ENCODER_SCHEDULER, *_CONNECTOR),
        "max_num_encoder_input_tokens max_num_scheduled_tokens scheduler_config",
    ),
    _row("v1.engine.EngineCoreOutputs", (*_ENCODER_SCHEDULER, *_OLDEST)),
    _row("v1.engine.EngineCoreOutputs", _PREFILL_SCHEDULER, "scheduler_stats"),
    _row("v1.request.Request", _PREFILL_SCHEDULER, "client_index"),
    _row(
        "v1.metrics.stats.SchedulerStats",
        (*_PREFILL_SCHEDULER, *_FRONT_CLIENT),
        "num_running_reqs num_waiting_reqs kv_cache_usage",
    ),
    _row(
        "v1.engine.EngineCoreOutput",
        (*_OLDEST, *_PREFILL_SCHEDULER),
        "request_id new_token_ids finish_reason events trace_headers",
    ),
    *(
        _row(
            f"v1.core.sched.request_queue.{queue}",
            _PREFILL_SCHEDULER,
            "remove_requests prepend_request",
        )
        for queue in ("FCFSRequestQueue", "PriorityRequestQueue")
    ),
    _row(
        "v1.core.encoder_cache_manager.EncoderCacheManager",
        ("items/table.py", "items/encoder_cache.py"),
        "cache_size check_and_update_cache can_allocate allocate get_cached_input_ids "
        "free_encoder_input free get_freed_mm_hashes",
        implemented=True,
    ),
    _row("v1.engine.core.EngineCore", _EXECUTOR, "model_executor", reaches=["step: execute_model"]),
    # Outputs that a step adds, of no request too, are sent as they are.
    _row(
        "v1.engine.core.EngineCoreProc",
        _PREFILL_SCHEDULER,
        reaches=[
            "step: update_from_output",
            "step_with_batch_queue: update_from_output",
            "_process_engine_step: put_nowait",
        ],
    ),
    # The connector.
    _row(
        "distributed.ec_transfer.ec_connector.base.ECConnectorBase",
        _CONNECTOR,
        "__init__ role is_producer _vllm_config bind_connector_metadata "
        "clear_connector_metadata start_load_caches save_caches get_finished has_cache_item "
        "update_state_after_alloc build_connector_meta update_connector_output "
        "request_finished",
        implemented=True,
    ),
    _row(
        "distributed.ec_transfer.ec_connector.base.ECConnectorMetadata",
        ("vllm_plugin/reports.py",),
    ),
    _row(
        "distributed.ec_transfer.ec_connector.base.ECConnectorRole", _CONNECTOR, "SCHEDULER WORKER"
    ),
    _row("distributed.ec_transfer.get_ec_transfer", _WORKER),
    _row("distributed.nixl_utils", _WORKER, "NixlWrapper"),
    _row(
        "distributed.ec_transfer.ec_connector.utils.PlaceholderMetadataResolver",
        _COMPAT,
        "__init__ fields_for",
        since=(0, 31),
    ),
    # What is read of requests and steps.
    _row("v1.request.Request", _CONNECTOR, "ec_transfer_params", since=(0, 26)),
    _row("v1.request.Request", _COMPAT, "kv_transfer_params"),
    _row(
        "v1.request.Request",
        (*_CONNECTOR, "items/table.py"),
        "request_id mm_features num_computed_tokens num_prompt_tokens status is_finished "
        "get_num_encoder_embeds",
    ),
    _row("v1.request.RequestStatus", _CONNECTOR, "RUNNING"),
    _row(
        "v1.core.sched.output.SchedulerOutput",
        (*_CONNECTOR, *_ENCODE_ONLY, *_EXECUTOR, "runners/first.py"),
        "total_num_scheduled_tokens num_scheduled_tokens scheduled_encoder_inputs "
        "scheduled_new_reqs free_encoder_mm_hashes finished_req_ids ec_connector_metadata",
    ),
    _row(
        "v1.core.sched.output.NewRequestData",
        (*_ENCODE_ONLY, "vllm_plugin/media_again.py"),
        "req_id mm_features",
    ),
    # The executor decides by every field whether a step concerns the workers: a field that only
    # describes how to compute tokens also belongs into `executor._HINTS`.
    _row(
        "v1.core.sched.output.SchedulerOutput",
        _EXECUTOR,
        "num_common_prefix_blocks",
        fields="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
        "total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs "
        "num_common_prefix_blocks finished_req_ids free_encoder_mm_hashes preempted_req_ids "
        "has_structured_output_requests pending_structured_output_tokens num_invalid_spec_tokens "
        "kv_connector_metadata ec_connector_metadata new_block_ids_to_zero "
        "num_spec_tokens_to_schedule scheduled_encoder_input_stats kv_cache_block_copies "
        "ec_manager_metadata partial_tail_offloads has_sync_kv_loads kv_connector_block_state "
        "block_table_updates aux_output_connector_metadata encoder_input_updates skip_drafts",
    ),
    _row(
        "v1.core.sched.output.CachedRequestData",
        _EXECUTOR,
        "req_ids",
        fields="req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids "
        "num_computed_tokens num_output_tokens",
    ),
    _row("v1.outputs.ECConnectorOutput", _CONNECTOR, "finished_sending finished_recving"),
    _row(
        "v1.outputs.ModelRunnerOutput",
        (*_ENCODE_ONLY, *_ENCODER_SCHEDULER),
        "req_id_to_index sampled_token_ids ec_connector_output",
    ),
    _row("v1.outputs.ModelRunnerOutput", _ENCODE_ONLY, "with_ec_conn_output", since=(0, 28)),
    _row("v1.outputs.EMPTY_MODEL_RUNNER_OUTPUT", _EXECUTOR),
    _row("v1.outputs.make_empty_encoder_model_runner_output", _ENCODE_ONLY),
    _row("multimodal.inputs.MultiModalFeatureSpec", _ITEMS, "identifier modality mm_position"),
    _row("multimodal.inputs.PlaceholderRange", _ITEMS, "offset length get_num_embeds"),
    _row("multimodal.utils.group_and_batch_mm_kwargs", _COMPAT),
    _row("multimodal.MULTIMODAL_REGISTRY", _COMPAT),
    _row("multimodal.media.MEDIA_CONNECTOR_REGISTRY", (*_BOUNDS, *_FRONT_URLS)),
    _row(
        "multimodal.media.MediaConnector",
        (*_BOUNDS, *_FRONT_URLS),
        "load_from_url load_from_url_async",
    ),
    _row("multimodal.media.video.VideoMediaIO", _BOUNDS, "video_loader"),
    _row(_FILMS, _BOUNDS, "compute_frames_index_to_sample"),
    _row(_FILMS, _BOUNDS, "read_frames", until=(0, 29)),
    _row(_OPENCV, _BOUNDS, "read_frames", since=(0, 29), until=(0, 30)),
    _row(_FILMS, _BOUNDS, "read_frames", since=(0, 30)),
    _row("multimodal.media.base.MediaIO", _BOUNDS, "load_bytes load_base64 load_file"),
    # Configuration.
    _row(
        "config.VllmConfig",
        (*_COMPAT, *_VIDEO_PARTS),
        "use_v2_model_runner parallel_config model_config ec_transfer_config scheduler_config "
        "lora_config",
    ),
    _row("config.parallel.ParallelConfig", _OVERLAP, "world_size"),
    _row(
        "config.ec_transfer.ECTransferConfig",
        (*_CONNECTOR, *_COMPAT),
        "is_ec_producer ec_connector_extra_config",
    ),
    _row(
        "config.scheduler.SchedulerConfig",
        (*_SCHEDULER, *_ENCODER_SCHEDULER),
        "async_scheduling scheduler_cls enable_chunked_prefill",
    ),
    _row(
        "config.model.ModelConfig",
        _COMPAT,
        "dtype hf_config is_encoder_decoder multimodal_config get_inputs_embeds_size",
    ),
    _row(
        "config.model.ModelConfig",
        ("vllm_plugin/agreement.py",),
        "model hf_config_path hf_overrides config_format revision code_revision hf_token "
        "trust_remote_code served_model_name multimodal_config quantization",
    ),
    _row(
        "config.multimodal.MultiModalConfig",
        ("vllm_plugin/agreement.py",),
        "mm_processor_kwargs media_io_kwargs",
    ),
    *(
        _row(f"config.multimodal.{name}", _COMPAT, since=(0, 32))
        for name in ("ImageDummyOptions", "VideoDummyOptions")
    ),
    # The first model runner and its workers.
    _row(
        _RUNNER,
        _FIRST,
        "execute_model sample_tokens _execute_mm_encoder _update_states encoder_cache "
        "requests input_batch maybe_save_ec_to_connector maybe_get_ec_connector_output",
        reaches=[
            "execute_model: _execute_mm_encoder _update_states "
            "make_empty_encoder_model_runner_output",
            "_execute_mm_encoder: maybe_save_ec_to_connector",
            "maybe_save_ec_to_connector: save_caches",
        ],
    ),
    _row("v1.worker.gpu_input_batch.CachedRequestState", _FIRST, "mm_features generator"),
    *(
        _row(
            owner,
            _WORKER,
            "init_device load_model initialize_from_config determine_available_memory "
            "compile_or_warm_up_model shutdown model_runner rank",
        )
        for owner in ("v1.worker.gpu_worker.Worker", "v1.worker.cpu_worker.CPUWorker")
    ),
    *(_row(owner, _WORKER, "profile_run") for owner in (_RUNNER, _SECOND_RUNNER)),
    # Overlapped encoding on devices.
    _row(_RUNNER, _OVERLAP, "encoder_cudagraph_manager"),
    _row(
        "v1.worker.gpu.mm.encoder_runner.EncoderRunner",
        _OVERLAP,
        "cudagraph_manager",
        since=(0, 28),
    ),
    _row(
        "v1.worker.encoder_cudagraph.EncoderCudaGraphManager",
        (*_OVERLAP, *_COMPAT),
        "capture execute graph_pool supports_modality",
    ),
    _row("distributed.parallel_state.GraphCaptureContext", _OVERLAP, "stream"),
    _row("distributed.parallel_state.graph_capture", _OVERLAP),
    _row("utils.torch_utils.current_stream", _OVERLAP),
    # The second model runner.
    _row(
        _SECOND_RUNNER,
        _SECOND,
        "load_model execute_model encoder_cache model_state ec_connector device lora_config "
        "kv_cache_config kv_caches model_memory_usage",
        reaches=["execute_model: maybe_get_output no_forward free_encoder_cache"],
        since=(0, 28),
    ),
    _row(
        _HOOKING,
        (*_CONNECTOR, *_ENCODE_ONLY),
        "maybe_get_output no_forward",
        reaches=[
            "maybe_get_output: bind_connector_metadata start_load_caches save_caches get_finished "
            "clear_connector_metadata",
            "no_forward: maybe_get_output",
        ],
        since=(0, 28),
    ),
    _row(_HOOKING, _CONNECTOR, reaches=["maybe_get_output: start_save_caches"], since=(0, 30)),
    _row(_STATE, _SECOND, "execute_mm_encoder", since=(0, 28)),
    _row(
        "v1.worker.gpu.mm.encoder_cache.EncoderCache",
        (*_SECOND, *_ENCODE_ONLY),
        "mm_features encoder_outputs add_request remove_request free_encoder_cache",
        since=(0, 28),
    ),
    _row(
        "v1.worker.mm_encoder_model_runner.MMEncoderModelRunner",
        _COMPAT,
        "execute_model",
        reaches=["execute_model: execute_mm_encoder no_forward"],
        since=(0, 29),
    ),
    _row(
        "v1.worker.mm_encoder_model_runner.MMEncoderModelRunner",
        _SECOND,
        "input_tensor_semaphore",
        reaches=["execute_model: input_tensor_semaphore"],
        since=(0, 32),
    ),
    # The front, and its engines.
    _row(
        "v1.engine.async_llm.AsyncLLM",
        _FRONT,
        "from_vllm_config _add_request abort reset_mm_cache shutdown renderer output_processor",
        reaches=["__init__: make_async_mp_client", "_add_request: add_request_async"],
    ),
    _row(
        "v1.engine.core_client.AsyncMPClient",
        (*_FRONT_CLIENT, *_FRONT_ENGINES),
        "__init__ add_request_async abort_requests_async get_output_async "
        "call_utility_async shutdown",
    ),
    _row(
        "v1.engine.core_client.AsyncMPClient",
        (*_FRONT_CLIENT, *_FRONT_ENGINES),
        "call_utility_all_async get_kv_event_sources",
        since=(0, 32),
    ),
    _row("v1.engine.core_client.EngineCoreClient", _FRONT, "make_async_mp_client"),
    # Jobs of fronts on other machines.
    _row(
        "v1.engine.core_client.AsyncMPClient",
        _HUB,
        "__init__ add_request_async abort_requests_async get_output_async call_utility_async",
        since=(0, 30),
    ),
    _row("multimodal.inputs.MultiModalKwargsItems", _JOB_ITEMS, "from_hf_inputs", since=(0, 30)),
    _row(
        "multimodal.processing.processor.BaseMultiModalProcessor",
        (*_JOB_ITEMS, *_COMPAT),
        "_get_mm_fields_config info",
        since=(0, 30),
    ),
    _row(
        "multimodal.processing.processor.BaseMultiModalProcessor",
        _COMPAT,
        "get_dummy_mm_inputs",
        since=(0, 32),
    ),
    _row(
        "multimodal.registry.MultiModalRegistry",
        _COMPAT,
        "get_dummy_mm_inputs",
        since=(0, 30),
        until=(0, 31),
    ),
    _row("lora.request.LoRARequest", _JOB_ITEMS, "lora_name lora_int_id lora_path"),
    _row(
        "v1.engine.core.EngineCoreProc",
        _ENGINE_CORE,
        "run_engine_core",
        reaches=["_perform_handshakes: _perform_handshake"],
    ),
    _row(
        "renderers.base.BaseRenderer",
        _FRONT,
        "_process_mm_uuids",
        reaches=["_process_multimodal: _process_mm_uuids"],
    ),
    _row("renderers.base.BaseRenderer", _FRONT, "start_mm_warmup_in_background", since=(0, 30)),
    _row(
        "v1.engine.EngineCoreRequest",
        (*_FRONT_CLIENT, *_VIDEO_PARTS),
        "request_id prompt_token_ids mm_features sampling_params resumable",
    ),
    _row(
        "v1.engine.EngineCoreOutput",
        (*_FRONT_CLIENT, *_PREFILL_SCHEDULER),
        "request_id new_token_ids finish_reason kv_transfer_params",
    ),
    _row("v1.engine.EngineCoreOutput", _ITEMS, "ec_transfer_params", since=(0, 26)),
    _row("v1.engine.EngineCoreOutputs", _FRONT_CLIENT, "outputs engine_index"),
    _row("v1.engine.FinishReason", _FRONT_CLIENT, "ERROR ABORT"),
    _row(
        "multimodal.inputs.MultiModalFeatureSpec",
        (*_ITEMS, *_VIDEO_PARTS),
        "data modality identifier mm_position",
    ),
    _row(
        "multimodal.inputs.PlaceholderRange",
        (*_FRONT_CLIENT, *_VIDEO_PARTS),
        "offset length is_embed",
    ),
    _row(
        _RUNNER,
        _VIDEO_PARTS,
        reaches=["_init_mrope_positions: get_mrope_input_positions"],
    ),
    _row(
        "v1.worker.gpu.mm.rope.RopeState",
        _VIDEO_PARTS,
        reaches=["init_prefill_positions: get_mrope_input_positions"],
        since=(0, 32),
    ),
    _row(
        "v1.engine.utils.EngineHandshakeMetadata",
        _ENGINE_CORE,
        "addresses parallel_config",
    ),
    _row("v1.engine.utils.EngineZmqAddresses", _ENGINE_CORE, "inputs outputs"),
    _row("v1.engine.exceptions.EngineDeadError", _FRONT_ENGINES),
    _row("v1.executor.Executor", (*_FRONT_ENGINES, *_ENGINE_CORE), "get_class"),
    _row(
        "engine.arg_utils.AsyncEngineArgs",
        (*_FRONT, *_ENGINE_CORE),
        "from_cli_args create_engine_config _api_process_count _api_process_rank",
    ),
    *(
        _row(f"entrypoints.{name}", _COMPAT, since=since, until=until)
        for name, since, until in (
            ("openai.api_server.build_and_serve", (0, 0), (0, 29)),
            ("openai.api_server.setup_server", (0, 0), (0, 29)),
            ("launchers.api_server.entry.build_and_serve", (0, 29), (99, 0)),
            ("launchers.launcher.setup_server", (0, 29), (99, 0)),
        )
    ),
    *(
        _row(f"entrypoints.{arguments}.{name}", by, since=since, until=until)
        for arguments, since, until in (
            ("openai.cli_args", (0, 0), (0, 29)),
            ("launchers.cli_args", (0, 29), (0, 33)),
            ("common.cli_args", (0, 33), (99, 0)),
        )
        for name, by in (
            ("make_arg_parser", (*_FRONT, *_ENGINE_CORE)),
            ("validate_parsed_serve_args", _FRONT),
        )
    ),
    *(
        _row(f"entrypoints.{startup}.cli_env_setup", (*_FRONT, *_ENGINE_CORE), since=s, until=u)
        for startup, s, u in (
            ("serve.utils.api_utils", (0, 0), (0, 33)),
            ("common.startup", (0, 33), (99, 0)),
        )
    ),
    _row("multimodal.parse.parse_mm_uuids", _FRONT),
    _row("usage.usage_lib.UsageContext", (*_FRONT, *_ENGINE_CORE), "OPENAI_API_SERVER"),
    _row("sampling_params.SamplingParams", _FRONT_CLIENT, "extra_args"),
    _row("exceptions.GracefulHTTPError", _COMPAT, since=(0, 29)),
    _row("entrypoints.openai.engine.protocol.GenerationError", _COMPAT, until=(0, 29)),
    _row("v1.engine.exceptions.EngineGenerateError", _COMPAT, until=(0, 29)),
    _row("v1.engine.async_llm.AsyncLLM", _COMPAT, "generate encode", until=(0, 29)),
    _row("utils.argparse_utils.FlexibleArgumentParser", (*_FRONT, *_ENGINE_CORE)),
)
