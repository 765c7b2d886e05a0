"""Every difference between versions of vLLM that the plug-in must bridge."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING, Any

import vllm

from epd_portable.errors import EngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Version = tuple[int, int]

OLDEST: Version = (0, 26)
NEWEST: Version = (0, 33)

FEEDS_CONNECTOR_OUTPUT: Version = (0, 29)
"""From here on the scheduler hands worker reports to the connector by itself."""
FAILS_UNAVAILABLE: Version = (0, 31)
"""From here on the scheduler asks ``take_unavailable_requests``."""


@cache
def version() -> Version:
    """Return major and minor version of the installed vLLM.

    Raises:
        EngineError: The plug-in does not know that version.
    """
    found = vllm.__version__
    parts = found.split(".")
    number = (int(parts[0]), int(parts[1]))
    if not OLDEST <= number <= NEWEST:
        raise EngineError(
            f"vLLM {found}: epd-portable knows {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}; install one of these"
        )
    return number


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse what this version of the plug-in cannot serve correctly.

    Raises:
        EngineError: Names the setting and the remedy.
    """
    version()
    parallel = vllm_config.parallel_config
    transfer = vllm_config.ec_transfer_config
    if vllm_config.use_v2_model_runner:
        raise EngineError(
            "vLLM's second model runner has none of the hooks that the plug-in needs: set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if parallel.pipeline_parallel_size > 1:
        raise EngineError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: items are placed on the "
            "first stage only, which is not supported yet; use tensor_parallel_size"
        )
    if parallel.data_parallel_size > 1:
        raise EngineError(
            f"data_parallel_size={parallel.data_parallel_size}: start more instances instead"
        )
    if transfer.is_ec_producer and transfer.is_ec_consumer:
        raise EngineError("ec_role 'ec_both': use ec_producer or ec_consumer")
    if transfer.is_ec_producer and parallel.tensor_parallel_size > 1:
        raise EngineError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} on an encode instance: "
            "start more encode instances instead"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise EngineError(
            "encoder-decoder models have no encoder outputs to transfer; serve them in one process"
        )


def dtype_name(vllm_config: VllmConfig) -> str:
    """Return the dtype of encoder outputs, as in `TensorSpec.dtype`."""
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def encoder_output_width(vllm_config: VllmConfig, modality: str) -> int:
    """Return the last dimension of the encoder's outputs.

    From 0.32 on a producer measures it at start-up; elsewhere it is the language model's hidden
    size, times one more than the number of DeepStack levels (Qwen3-VL packs them side by side).
    """
    measured: dict[str, int] = getattr(
        vllm_config.ec_transfer_config, "mm_encoder_output_widths", {}
    )
    if modality in measured:
        return measured[modality]
    model = vllm_config.model_config
    vision = getattr(model.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(model.get_inputs_embeds_size()) * (1 + len(levels))


def fingerprint(vllm_config: VllmConfig) -> str:
    """Return a digest of everything that an encode and a PD instance must agree on."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    agreed = {
        "model": model.served_model_name,
        "config": config,
        "revision": model.revision,
        "dtype": dtype_name(vllm_config),
        "mm_processor_kwargs": getattr(model.multimodal_config, "mm_processor_kwargs", None),
    }
    text = json.dumps(agreed, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def transfer_params(request: Any) -> dict[str, Any] | None:
    """Return the ``ec_transfer_params`` that came with a request."""
    params = request.ec_transfer_params
    return params if isinstance(params, dict) else None
