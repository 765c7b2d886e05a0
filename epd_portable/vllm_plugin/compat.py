"""Every difference between versions of vLLM that the plug-in must bridge."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import vllm

from epd_portable.errors import EngineError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from epd_portable.platforms.base import Platform

Version = tuple[int, int]

OLDEST: Version = (0, 23)
NEWEST: Version = (0, 33)

OUR_MODULES = "epd_portable.vllm_plugin."
"""Prefix of the scheduler class that an engine must be started with."""

# The first version of each ability:
CARRIES_PARAMS: Version = (0, 26)
"""``ec_transfer_params`` reach the connector, and its reply reaches the client."""
RETURNS_REQUESTS: Version = (0, 26)
"""The scheduler returns the requests that it was instructed to end; before, their ids and
clients."""
SECOND_RUNNER: Version = (0, 28)
"""The second model runner (``VLLM_USE_V2_MODEL_RUNNER=1``) has the hooks."""
FEEDS_CONNECTOR_OUTPUT: Version = (0, 28)
"""The scheduler hands worker reports to the connector."""
ENDS_ENCODED: Version = (0, 29)
"""An encode instance ends a request when its prompt is encoded; before, with the first token, which
it makes up in every step."""
ENCODE_ONLY_RUNNER: Version = (0, 29)
"""The second model runner of an encode instance is a class of its own."""
PROFILES_ENCODER: Version = (0, 30)
"""The largest step of an encode instance has no language model; before, vllm-ascend computes it,
and it has no weights there."""
FAILS_UNAVAILABLE: Version = (0, 30)
"""The scheduler calls ``take_unavailable_requests``."""
STARTS_SAVES: Version = (0, 30)
"""The second model runner calls ``start_save_caches``."""
HAS_METADATA: Version = (0, 31)
"""The engine knows the fields of an item without its media, and takes them as plain JSON."""
MEASURES_WIDTHS: Version = (0, 32)
"""The engine of an encode instance measures the width of its outputs."""
HAS_LAUNCHERS: Version = (0, 29)
"""The start of its server is in ``entrypoints.launchers``, and errors can name their status."""
SHARES_STARTUP: Version = (0, 33)
"""The start of its commands is in ``entrypoints.common``; before, with its server."""

DUMMY_SIDE = 224
"""Pixels of a side of the items that vLLM measures with."""
DUMMY_FRAMES = 4


@cache
def version() -> Version:
    """Return major and minor version of the installed vLLM; `EngineError` if it is unknown."""
    found = vllm.__version__
    parts = found.split(".")
    number = (int(parts[0]), int(parts[1]))
    if not OLDEST <= number <= NEWEST:
        raise EngineError(
            f"vLLM {found}: epd-portable knows {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}; install one of these"
        )
    return number


def check_supported(vllm_config: VllmConfig, *, can_encode: bool = True) -> None:
    """Raise `EngineError` with every setting that the plug-in cannot serve correctly.

    The launcher refuses others, by the schema of the topology file.

    Args:
        can_encode: See `InstanceConfig`.
    """
    version()
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    encodes = vllm_config.ec_transfer_config.is_ec_producer
    ec_manager = getattr(vllm_config, "ec_manager_config", None)
    manager = ec_manager and ec_manager.encoder_cache_manager_cls
    pruning = getattr(model.multimodal_config, "video_pruning_rate", None)
    problems: list[tuple[Any, str]] = [
        (
            vllm_config.use_v2_model_runner and version() < SECOND_RUNNER,
            f"vLLM {vllm.__version__}: its second model runner has none of the hooks that the "
            "plug-in needs: set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            encodes and scheduler.async_scheduling,
            "async_scheduling on an encode instance: it generates nothing, so no step can be "
            "scheduled ahead; pass --no-async-scheduling",
        ),
        (
            not str(scheduler.scheduler_cls).startswith(OUR_MODULES),
            f"the engine schedules with {scheduler.scheduler_cls}: leave scheduler_cls to the "
            "launcher, and leave out platform options that replace it (in vllm-ascend: recompute, "
            "dyntra, batch job and profiling chunk settings in additional_config)",
        ),
        (
            manager is not None,
            f"ec_manager_config: {manager} cannot be used with the encoder cache of "
            "epd-portable: leave it out",
        ),
        (
            pruning,
            f"video_pruning_rate={pruning}: what is left of a video is known only when it is "
            "encoded, too late to make space for it elsewhere; leave it out",
        ),
        (
            model.is_encoder_decoder,
            "encoder-decoder models have no encoder outputs to transfer; serve them in one process",
        ),
        (
            not can_encode and version() < HAS_METADATA,
            f"vLLM {vllm.__version__} takes no item without its media: a prefill+decode instance "
            f"without encoder needs {HAS_METADATA[0]}.{HAS_METADATA[1]} or later; set "
            "instances.prefill_decode.encoder to true",
        ),
    ]
    if found := [problem for applies, problem in problems if applies]:
        raise EngineError("; ".join(found))


def check_dtype(vllm_config: VllmConfig, platform: Platform) -> None:
    """Raise `EngineError` if the worker's current device does not compute in the dtype."""
    dtype = vllm_config.model_config.dtype
    if not platform.supports_dtype(dtype):
        raise EngineError(
            f"this {platform.name} device does not compute in {dtype}: set engine_args.dtype, for "
            "example to float16"
        )


def check_runner(runner: Any, *, second: bool) -> None:
    """Raise `EngineError` if a platform's model runner is not derived from the one of vLLM."""
    module = "vllm.v1.worker.gpu.model_runner" if second else "vllm.v1.worker.gpu_model_runner"
    kind = importlib.import_module(module).GPUModelRunner
    if not isinstance(runner, kind):
        made = type(runner)
        raise EngineError(
            f"model runner {made.__module__}.{made.__name__}: not derived from "
            f"{module}.GPUModelRunner, which epd-portable extends. Set "
            f"VLLM_USE_V2_MODEL_RUNNER={int(not second)}, or report it with the engine's version"
        )


def encodes_only(runner: Any) -> bool:
    """Return whether an encode instance's second runner is vLLM's own one without language model.

    A platform's class over it has buffers and a warm-up of its own, which need parts that an encode
    instance does not have.
    """
    if version() < ENCODE_ONLY_RUNNER:
        return bool(runner.is_encoder_only)
    from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

    return type(runner) is MMEncoderModelRunner


def dtype_name(vllm_config: VllmConfig) -> str:
    """Return the dtype of encoder outputs, as in `TensorSpec.dtype`."""
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def kv_cache_bytes(vllm_config: VllmConfig) -> int | None:
    """Return the memory that is set for KV; ``None`` where an engine takes what is left.

    A CPU's engines have it from ``VLLM_CPU_KVCACHE_SPACE``, in a field of its own before 0.32.
    """
    cache = vllm_config.cache_config
    found: int | None = getattr(cache, "cpu_kvcache_space_bytes", None)
    return cache.kv_cache_memory_bytes if found is None else found


def small_dummies(vllm_config: VllmConfig) -> Callable[[], None]:
    """Let vLLM measure an encoder's output width with small items; return what ends that.

    From 0.32 on a producer's engine encodes the largest item of each modality once its model is
    loaded (`encoder_output_width.py`), only to look at the last dimension, which does not depend
    on the size. On one core an image of 12.8 million pixels, the default of Qwen2.5-VL, takes
    minutes.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if version() < MEASURES_WIDTHS or multimodal is None:
        return lambda: None
    from vllm.config.multimodal import ImageDummyOptions, VideoDummyOptions

    before, side = multimodal.limit_per_prompt, DUMMY_SIDE
    image = before.get("image") or ImageDummyOptions()
    video = before.get("video") or VideoDummyOptions()
    multimodal.limit_per_prompt = {
        **before,
        "image": replace(image, width=side, height=side),
        "video": replace(video, num_frames=DUMMY_FRAMES, width=side, height=side),
    }

    def restore() -> None:
        multimodal.limit_per_prompt = before

    return restore


def encoder_output_width(vllm_config: VllmConfig, modality: str) -> int:
    """Return the last dimension of the encoder's outputs.

    From 0.32 on a producer measures it at start-up. Elsewhere it is the language model's hidden
    size; for images and videos of models with DeepStack (Qwen3-VL), times the number of levels and
    one, which are packed side by side.
    """
    measured: dict[str, int] = getattr(
        vllm_config.ec_transfer_config, "mm_encoder_output_widths", {}
    )
    if modality in measured:
        return measured[modality]
    model = vllm_config.model_config
    width = int(model.get_inputs_embeds_size())
    if modality == "audio":
        return width
    whole = model.hf_config
    # Omni models have a part for encoders.
    vision = getattr(getattr(whole, "thinker_config", whole), "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return width * (1 + len(levels))


def widest_output(vllm_config: VllmConfig) -> int:
    """Return the largest last dimension of the encoder's outputs."""
    return max(encoder_output_width(vllm_config, each) for each in ("image", "video", "audio"))


def awaits_kv(request: Request) -> bool:
    """Return whether another instance has computed a request's prompt, and its KV is to be read."""
    # Clients of vLLM before 0.32 may send any value by ``vllm_xargs``.
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def encode(
    model: Any, modality: str, media: Any, device: torch.device, graphs: Any = None
) -> torch.Tensor:
    """Return the encoder's output ``(num_embeds, width)`` of one ``MultiModalKwargsItem``.

    As vLLM's runner computes it (``_execute_mm_encoder``, 0.26 to 0.33), with its captured graphs
    (``EncoderCudaGraphManager``) if they are given.
    """
    from vllm.multimodal import utils

    batches = utils.group_and_batch_mm_kwargs([(modality, media)], device=device)
    ((_, _, arguments),) = batches
    outputs = None
    if graphs is not None and graphs.supports_modality(modality):
        outputs = graphs.execute(arguments)
    output: torch.Tensor
    (output,) = model.embed_multimodal(**arguments) if outputs is None else outputs
    return output


def encoder_modules(model: Any) -> list[torch.nn.Module]:
    """Return the modules that compute a model's encoder outputs, inner ones as well.

    vLLM calls some around torch's hooks (``support_torch_compile``), but never all of them.
    """
    language = set(model.get_language_model().modules())
    return [each for each in model.modules() if each not in language and each is not model]


def encoder_blocks(model: Any) -> list[torch.nn.Module]:
    """Return the blocks of a model's encoders: members of their lists of modules, in no order.

    Of lists within each other, the members of the outer one.
    """
    from torch.nn import ModuleList

    blocks: list[torch.nn.Module] = []
    within: set[torch.nn.Module] = set()
    for each in encoder_modules(model):  # Outer modules come before inner ones.
        if isinstance(each, ModuleList) and each not in within:
            blocks += each
            within.update(each.modules())
    return blocks


def metadata_fields(vllm_config: VllmConfig) -> dict[str, set[str]]:
    """Return the metadata fields of every modality that the model takes; none before vLLM 0.31.

    The first call in a process may load the model's processor, which takes a second and more.
    """
    model = vllm_config.model_config
    if version() < HAS_METADATA or not model.is_multimodal_model:
        return {}
    from vllm.distributed.ec_transfer.ec_connector import utils
    from vllm.multimodal import MULTIMODAL_REGISTRY

    resolver = utils.PlaceholderMetadataResolver(model)
    modalities = MULTIMODAL_REGISTRY.create_processor(model).info.supported_mm_limits
    return {modality: resolver.fields_for(modality) for modality in modalities}


def sample_items(vllm_config: VllmConfig, processor: Any) -> dict[str, dict[str, Any]]:
    """Return what a processor makes of a small item of each modality: fields as of a batch."""
    found = {}
    restore = small_dummies(vllm_config)
    try:
        for modality in processor.info.allowed_mm_limits:
            if hasattr(processor, "get_dummy_mm_inputs"):
                inputs = processor.get_dummy_mm_inputs({modality: 1})
            else:  # Before 0.32.
                from vllm.multimodal import MULTIMODAL_REGISTRY

                model = vllm_config.model_config
                inputs = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(
                    model, {modality: 1}, processor=processor
                )
            items = inputs["mm_kwargs"][modality]
            found[modality] = {
                name: element.field.reduce_data([element]) for name, element in items[0].items()
            }
    finally:
        restore()
    return found


def server_commands() -> tuple[Any, Any]:
    """Return vLLM's modules of its server's arguments, and of how its commands start."""
    if version() < HAS_LAUNCHERS:
        from vllm.entrypoints.openai import cli_args
        from vllm.entrypoints.serve.utils import api_utils

        return cli_args, api_utils
    if version() < SHARES_STARTUP:
        from vllm.entrypoints.launchers import cli_args
        from vllm.entrypoints.serve.utils import api_utils

        return cli_args, api_utils
    from vllm.entrypoints.common import cli_args, startup

    return cli_args, startup


def server() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return vLLM's functions that serve an engine client and that open its socket."""
    if version() < HAS_LAUNCHERS:
        from vllm.entrypoints.openai.api_server import build_and_serve, setup_server
    else:
        from vllm.entrypoints.launchers.api_server.entry import build_and_serve
        from vllm.entrypoints.launchers.launcher import setup_server
    shares = "reuse_port" in inspect.signature(setup_server).parameters
    return build_and_serve, partial(setup_server, reuse_port=False) if shares else setup_server


@cache
def graceful_error() -> Any:
    """Return the class of errors that clients get with a status of their own."""
    if version() >= HAS_LAUNCHERS:
        from vllm.exceptions import GracefulHTTPError

        return GracefulHTTPError
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    return status_error(GenerationError)


def status_error(base: type[Exception]) -> Any:
    """Return a class over ``base`` with the attributes of vLLM's ``GracefulHTTPError``.

    Args:
        base: Class of errors whose ``status_code`` vLLM's handlers read.
    """

    class StatusError(base):  # type: ignore[misc,valid-type]
        def __init__(self, message: str, http_status: Any) -> None:
            super().__init__(message)
            self.message = message
            self.status_code = self.http_status = http_status

    return StatusError


def passing_errors(base: type) -> Any:
    """Return ``AsyncLLM`` whose requests end with the status of `graceful_error`, not with 500."""
    if version() >= HAS_LAUNCHERS:
        return base
    from vllm.v1.engine.exceptions import EngineGenerateError

    graceful = graceful_error()

    async def bare(answers: Any) -> Any:
        try:
            async with aclosing(answers):
                async for each in answers:
                    yield each
        except EngineGenerateError as error:
            if isinstance(error.__cause__, graceful):
                raise error.__cause__ from None
            raise

    class PassingLLM(base):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return bare(super().generate(*args, **kwargs))

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            return bare(super().encode(*args, **kwargs))

    return PassingLLM
