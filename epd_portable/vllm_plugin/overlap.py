"""Overlapped encoding of a prefill+decode instance: its way, and its uses of vLLM.

See `epd_portable.encode.background` and `epd_portable.encode.chunks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from epd_portable.encode.background import BackgroundEncoder, StepEncoder
from epd_portable.encode.chunks import ChunkEncoder
from epd_portable.envs import EPD_ENCODE_OVERLAP
from epd_portable.items.placer import EncodeOrder
from epd_portable.platforms.base import RaisesStreams
from epd_portable.platforms.traits import TRAITS, Overlap
from epd_portable.vllm_plugin import compat

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from epd_portable.config.instance import InstanceConfig
    from epd_portable.platforms.base import Platform
    from epd_portable.transfer.copies import DeviceCopies

logger = logging.getLogger(__name__)


def overlap_of(vllm_config: VllmConfig, instance: InstanceConfig) -> Overlap:
    """Return the way in which an instance encodes next to its steps; ``none`` if steps encode.

    A thread takes turns only with the steps of vLLM's first runner, and of one rank: several would
    have to agree on the order of their collectives. Chunks have that order, unless each rank
    encodes other items. Their own stream would reorder them, so several ranks use that of the
    steps. With priority ``images`` steps of a device encode, as vLLM's do; also those of an
    instance that encodes only what no other does, and whose memory is for KV.
    """
    found = TRAITS[instance.platform].overlap
    if found != "turns" and not instance.overlaps:
        found = "none"
    found = EPD_ENCODE_OVERLAP.get() or found
    if (
        not instance.can_encode
        or vllm_config.ec_transfer_config.is_ec_producer
        or vllm_config.lora_config is not None
    ):
        return "none"
    alone = vllm_config.parallel_config.world_size == 1
    if found == "turns":
        return found if alone and not vllm_config.use_v2_model_runner else "none"
    multimodal = vllm_config.model_config.multimodal_config
    divides_items = not alone and getattr(multimodal, "mm_encoder_tp_mode", None) == "data"
    if instance.encode_priority == "images" or divides_items:
        return "none"
    return "chunks" if found == "stream" and not alone else found


def make_encoder(
    overlap: Overlap,
    runner: Any,
    vllm_config: VllmConfig,
    instance: InstanceConfig,
    copies: DeviceCopies,
) -> StepEncoder:
    """Return what encodes items that no step of vLLM encodes.

    Args:
        runner: Has loaded the model, in the thread of its steps.
    """
    model, priority = runner.get_model(), instance.encode_priority
    aside = overlap == "stream"
    if aside and isinstance(copies.platform, RaisesStreams):
        copies.platform.raise_current_stream()

    def encode(item: EncodeOrder) -> torch.Tensor:
        # A graph is one chunk, whose end a step on the same stream would wait for.
        graphs = encoder_graphs(runner) if aside else None
        return compat.encode(model, item.modality, item.media, runner.device, graphs)

    if overlap == "none":
        return StepEncoder(encode)
    if overlap == "turns":
        return BackgroundEncoder(encode, compat.encoder_modules(model), priority)
    # No hook may be within what is compiled.
    compiled = getattr(vllm_config.compilation_config, "compile_mm_encoder", False)
    blocks = [] if compiled else compat.encoder_blocks(model)
    ranks = vllm_config.parallel_config.world_size
    return ChunkEncoder(encode, blocks, copies, priority, aside=aside, ranks=ranks)


def encoder_graphs(runner: Any) -> Any:
    """Return vLLM's captured graphs of an encoder (``EncoderCudaGraphManager``), if it has some."""
    state = getattr(runner, "model_state", None)
    if state is None:
        graphs = getattr(runner, "encoder_cudagraph_manager", None)
    else:
        graphs = getattr(getattr(state, "encoder_runner", None), "cudagraph_manager", None)
    # None before they are captured.
    return graphs if graphs is not None and graphs.graph_pool is not None else None


@contextmanager
def encoder_measured(model: Any) -> Iterator[Callable[[], int]]:
    """Measure the encoder while vLLM profiles a model; give what returns its peak, in bytes.

    vLLM sizes the KV cache for the larger of encoder and step (0.23 to 0.33), one after the other.
    """
    from torch import accelerator

    encode, peak = model.embed_multimodal, 0

    def measured(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        before = accelerator.memory_allocated()
        outputs = encode(*args, **kwargs)
        # The encoder comes first, so that no step has a part in the peak.
        peak = max(peak, accelerator.max_memory_allocated() - before)
        return outputs

    model.embed_multimodal = measured
    try:
        yield lambda: peak
    finally:
        model.embed_multimodal = encode


@contextmanager
def captured_apart(platform: Platform, index: int) -> Iterator[None]:
    """Capture graphs of steps on the current stream, and those of encoders on the encode stream.

    A node of a graph has the priority of the stream that captures it, whichever replays it. vLLM
    captures both on one stream of its own (``graph_capture``, 0.23 to 0.33).
    """
    from vllm.distributed import parallel_state
    from vllm.utils.torch_utils import current_stream
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    context, capture = parallel_state.GraphCaptureContext, EncoderCudaGraphManager.capture

    def capture_aside(*args: Any, **kwargs: Any) -> Any:
        before = platform.record_event()
        with platform.stream(index, "encode"):
            before.wait()
            return capture(*args, **kwargs)

    # vLLM imports neither by its name elsewhere.
    parallel_state.GraphCaptureContext = lambda stream: context(current_stream())
    EncoderCudaGraphManager.capture = capture_aside
    try:
        yield
    finally:
        parallel_state.GraphCaptureContext = context
        EncoderCudaGraphManager.capture = capture
