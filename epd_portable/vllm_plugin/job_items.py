"""Items of encode jobs: from what a front's vLLM made of them to messages, and to an engine's vLLM.

An engine trusts its clients: a tensor of another shape than its model expects ends it. So a job's
fields are compared with what the engine's own processor makes, before the engine sees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from epd_portable.errors import ProtocolError
from epd_portable.vllm_plugin import compat
from epd_portable.wire.jobs import JOB_DTYPES, Job, JobLora, JobTensor, offsets
from epd_portable.wire.params import FIELD, EncodeParams, EncodeTransfer, read_params, to_params

_TENSOR = "tensor"
_MAX_DEPTH = 3


def encode_request(
    job: str,
    token_ids: Sequence[int],
    feature: MultiModalFeatureSpec,
    transfer: EncodeTransfer,
    *,
    arrival_time: float,
    lora_request: Any = None,
    priority: int = 0,
    trace_headers: Any = None,
) -> EngineCoreRequest:
    """Return the request that has one item encoded and brought to its consumer.

    Args:
        token_ids: Of the item's places, which begin at 0.
    """
    params = to_params(EncodeParams(transfers=(transfer,)))
    return EngineCoreRequest(
        request_id=job,
        prompt_token_ids=[*token_ids],
        mm_features=[feature],
        sampling_params=SamplingParams(max_tokens=1, temperature=0, extra_args={FIELD: params}),
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=lora_request,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
        trace_headers=trace_headers,
    )


def to_job(request: EngineCoreRequest, config: VllmConfig) -> tuple[Job, list[memoryview]]:
    """Return what `encode_request` made as a message, and the bytes of its tensors.

    Raises:
        ProtocolError: It cannot be sent.
    """
    assert request.mm_features is not None
    assert request.sampling_params is not None
    (feature,) = request.mm_features
    assert feature.data is not None
    given = (request.sampling_params.extra_args or {})[FIELD]
    (transfer,) = read_params(given, EncodeParams).transfers
    tensors: list[JobTensor] = []
    data: list[memoryview] = []
    run = _run_of_frames(config) if feature.modality == "image" else 0
    fields = {
        name: _pack(element.field.reduce_data([element]), tensors, data, run, 0)
        for name, element in feature.data.items()
    }
    mask = feature.mm_position.is_embed
    lora = request.lora_request
    of_encoder = getattr(config.lora_config, "enable_tower_connector_lora", False)
    job = Job(
        job=request.request_id,
        modality=feature.modality,
        item=feature.identifier,
        token_ids=tuple(request.prompt_token_ids or ()),
        fields=fields,
        tensors=tuple(tensors),
        transfer=transfer,
        embeds=b"" if mask is None else mask.to(torch.uint8).numpy().tobytes(),
        lora=JobLora(name=lora.lora_name, number=lora.lora_int_id, path=lora.lora_path)
        if lora is not None and of_encoder
        else None,
        priority=request.priority,
        trace_headers={**(request.trace_headers or {})},
    )
    return job, data


def _run_of_frames(config: VllmConfig) -> int:
    """Return how many elements of a patch one frame has, for models that take pairs of frames."""
    vision = getattr(config.model_config.hf_config, "vision_config", None)
    if getattr(vision, "temporal_patch_size", 1) != 2:
        return 0
    return int(getattr(vision, "patch_size", 0)) ** 2


def _pack(
    value: Any, tensors: list[JobTensor], data: list[memoryview], run: int, depth: int
) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        repeats = 1
        if run and value.ndim > 1 and value.shape[-1] % (2 * run) == 0:
            # Six times as fast as torch's comparison and copy of elements.
            pairs = plain.view(f"V{run * value.element_size()}").reshape(-1, 2)
            one, other = (np.ascontiguousarray(pairs[:, each]).view(np.uint8) for each in (0, 1))
            words = f"u{math.gcd(one.nbytes, 8) or 1}"
            if np.array_equal(one.view(words), other.view(words)):
                plain, repeats = one, 2
        try:
            found = JobTensor(
                dtype=dtype, shape=tuple(value.shape), repeats=repeats, run=run * (repeats > 1)
            )
        except ValueError as error:
            raise ProtocolError(f"an item for another machine: {error}") from error
        tensors.append(found)
        data.append(plain.data)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return [_pack(each, tensors, data, run, depth + 1) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ProtocolError(f"an item for another machine: a field is a {type(value).__name__}")


class ItemReader:
    """Makes an engine's requests of jobs.

    The model's processor is loaded here, before the engine is ready.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        model = config.model_config
        self._processor = compat.item_processor(config)
        self._samples = compat.sample_items(config, self._processor)
        self._most_tokens = model.max_model_len
        self._most_embeds = config.scheduler_config.encoder_cache_size
        vision = getattr(model.hf_config, "vision_config", None)
        self._merge = int(getattr(vision, "spatial_merge_size", 0) or 0)

    def request(self, job: Job, data: np.ndarray[Any, Any], arrival_time: float) -> Any:
        """Return a job as the engine takes it.

        Args:
            data: Of its tensors, as bytes; the request may share this memory.

        Raises:
            ProtocolError: The engine could not encode it.
        """
        lora = None
        if job.lora is not None:
            if self._config.lora_config is None:
                raise ProtocolError(
                    f"adapter {job.lora.name!r}: this engine serves none. Set "
                    "engine_args.enable_lora as at the front"
                )
            lora = LoRARequest(job.lora.name, job.lora.number, job.lora.path)
        return encode_request(
            job.job,
            job.token_ids,
            self._feature(job, data),
            job.transfer,
            arrival_time=arrival_time,
            lora_request=lora,
            priority=job.priority,
            trace_headers=job.trace_headers or None,
        )

    def _feature(self, job: Job, data: np.ndarray[Any, Any]) -> MultiModalFeatureSpec:
        sample = self._samples.get(job.modality)
        if sample is None:
            raise ProtocolError(
                f"{job.modality}: the model takes {', '.join(self._samples) or 'no media'}"
            )
        if job.fields.keys() != sample.keys():
            raise ProtocolError(
                f"fields {', '.join(job.fields)}: {', '.join(sample)} here. Run releases of vLLM "
                "at front and engine that process this model's items alike"
            )
        places = self._places(job)
        begins, _ = offsets(job.tensors)
        tensors = [
            _tensor(each, data[begin : begin + each.nbytes])
            for each, begin in zip(job.tensors, begins, strict=True)
        ]
        given = {name: _unpack(value, tensors, 0) for name, value in job.fields.items()}
        for name, value in given.items():
            _compare(name, value, sample[name])
        try:
            fields = self._processor._get_mm_fields_config(given, {})
            items = MultiModalKwargsItems.from_hf_inputs(given, fields)[job.modality]
        except Exception as error:  # Whatever a model's own code makes of them.
            raise ProtocolError(f"its fields do not fit together: {error!r}") from error
        if len(items) != 1 or items[0].keys() != given.keys():
            raise ProtocolError(f"its fields are those of {len(items)} items: 1 is allowed")
        for name, element in items[0].items():
            whole, found = given[name], element.field.reduce_data([element])
            if isinstance(whole, torch.Tensor) and found.shape != whole.shape:
                raise ProtocolError(
                    f"{name} of shape {tuple(whole.shape)}: its item has {tuple(found.shape)}"
                )
        self._compare_grid(given, places)
        return MultiModalFeatureSpec(
            data=items[0], modality=job.modality, identifier=job.item, mm_position=places
        )

    def _places(self, job: Job) -> PlaceholderRange:
        count = len(job.token_ids)
        if count > self._most_tokens:
            raise ProtocolError(f"{count} tokens: at most max_model_len of {self._most_tokens}")
        mask = None
        if job.embeds:
            if len(job.embeds) != count or not any(job.embeds):
                raise ProtocolError(f"embeds of {len(job.embeds)} places: {count}, some not 0")
            mask = torch.frombuffer(bytearray(job.embeds), dtype=torch.uint8).bool()
        places = PlaceholderRange(0, count, mask)
        if (embeds := places.get_num_embeds()) > self._most_embeds:
            raise ProtocolError(
                f"{embeds} embeddings: the encoder cache takes {self._most_embeds}. Raise "
                "engine_args.max_num_batched_tokens of the encode instance"
            )
        return places

    def _compare_grid(self, given: dict[str, Any], places: PlaceholderRange) -> None:
        """Compare a grid of patches with the item's embeddings, where the model merges patches."""
        for name, grid in given.items():
            if not name.endswith("_grid_thw") or not self._merge or grid.numel() != 3:
                continue
            frames, height, width = grid.reshape(-1).tolist()
            embeds = frames * (height // self._merge) * (width // self._merge)
            if height % self._merge or width % self._merge or embeds != places.get_num_embeds():
                raise ProtocolError(
                    f"{name} {frames}, {height}, {width}: not {places.get_num_embeds()} groups of "
                    f"{self._merge} x {self._merge}"
                )


def _tensor(spec: JobTensor, data: np.ndarray[Any, Any]) -> torch.Tensor:
    if spec.repeats > 1:
        # numpy, as torch would start threads beside the engine's.
        runs = data.view(f"V{spec.run * JOB_DTYPES[spec.dtype]}")
        data = np.repeat(runs, spec.repeats).view(np.uint8)
    return torch.from_numpy(data).view(getattr(torch, spec.dtype)).reshape(spec.shape)


def _unpack(value: Any, tensors: Sequence[torch.Tensor], depth: int) -> Any:
    if isinstance(value, dict):
        index = value.get(_TENSOR)
        if value.keys() != {_TENSOR} or not isinstance(index, int):
            raise ProtocolError(f"a field with keys {', '.join(map(repr, value))[:200]}")
        if not 0 <= index < len(tensors):
            raise ProtocolError(f"tensor {index}: there are {len(tensors)}")
        return tensors[index]
    if isinstance(value, list):
        if depth > _MAX_DEPTH:
            raise ProtocolError(f"lists in more than {_MAX_DEPTH} levels")
        return [_unpack(each, tensors, depth + 1) for each in value]
    return value


def _compare(name: str, value: Any, sample: Any) -> None:
    """Compare a field with what this engine's processor makes of a small item."""
    if isinstance(sample, torch.Tensor) != isinstance(value, torch.Tensor):
        raise ProtocolError(f"{name}: a {type(value).__name__}, not a {type(sample).__name__}")
    if not isinstance(value, torch.Tensor):
        if isinstance(sample, list) and sample and isinstance(value, list):
            for each in value:
                _compare(name, each, sample[0])
        return
    if value.dtype != sample.dtype or value.ndim != sample.ndim:
        raise ProtocolError(
            f"{name} of {value.dtype} in {value.ndim} dimensions: {sample.dtype} in {sample.ndim} "
            "here. Run releases of vLLM at front and engine that process this model's items alike"
        )
    if value.ndim == 2 and value.shape[1] != sample.shape[1]:
        raise ProtocolError(f"{name} of width {value.shape[1]}: {sample.shape[1]} here")
