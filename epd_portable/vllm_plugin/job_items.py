"""Jobs for other machines: a front's requests as messages, and these as an engine's requests.

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
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems, PlaceholderRange
from vllm.v1.engine import EngineCoreRequest

from epd_portable.config.roles import ENCODES, SENDS_KV, Role
from epd_portable.config.secret import Secret
from epd_portable.errors import ProtocolError
from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.requests import (
    KV,
    ItemMetadata,
    encode_request,
    prefill_sampling,
    request_of,
)
from epd_portable.wire import jobs
from epd_portable.wire.params import (
    FIELD,
    EncodeParams,
    PrefillParams,
    read_params,
)

_TENSOR = "tensor"
_MAX_DEPTH = 3


def to_job(
    request: EngineCoreRequest, config: VllmConfig, secret: Secret
) -> tuple[jobs.Job, list[memoryview]]:
    """Return an encode or a prefill job as a message, and the bytes of its tensors.

    Args:
        request: By `encode_request`, or with the parameters of `prefill_sampling`.

    Raises:
        ProtocolError: It cannot be sent.
    """
    assert request.sampling_params is not None
    extra = request.sampling_params.extra_args or {}
    given, prefills = extra.get(FIELD), KV in extra
    tensors: list[jobs.JobTensor] = []
    data: list[memoryview] = []
    _pack(torch.tensor(request.prompt_token_ids, dtype=torch.int32), tensors, data, 0, 0)
    items = tuple(_item(each, config, tensors, data) for each in request.mm_features or ())
    lora = request.lora_request
    head: dict[str, Any] = {
        "job": request.request_id,
        "items": items,
        "tensors": tuple(tensors),
        "lora": None if lora is None else jobs.JobLora(name=lora.lora_name, path=lora.lora_path),
        "priority": request.priority,
        "trace_headers": {**(request.trace_headers or {})},
    }
    if prefills:
        proof = proof_of_prefill(request.request_id, secret)
        params = read_params(given, PrefillParams) if given else PrefillParams(transfers=())
        job = jobs.KvJob(
            **head,
            proof=proof,
            expected=params.transfers,
            cache_salt=request.cache_salt,
            sample=params.sample,
        )
        return job, data
    assert given is not None
    (transfer,) = read_params(given, EncodeParams).transfers
    return jobs.EncodeJob(**head, transfer=transfer), data


def proof_of_prefill(job: str, secret: Secret) -> str:
    """Return `KvJob.proof`."""
    return secret.sign_transfer(job, "", "prefill")


def is_proved(job: jobs.Job, secret: Secret) -> bool:
    """Return whether a holder of the secret has sent a job."""
    if isinstance(job, jobs.KvJob):
        return secret.verify_transfer(job.proof, job.job, "", "prefill")
    to = job.transfer
    return secret.verify_transfer(to.proof, to.transfer_id, to.item_uuid, to.consumer) and all(
        each.item == to.item_uuid for each in job.items
    )


def _item(
    feature: MultiModalFeatureSpec,
    config: VllmConfig,
    tensors: list[jobs.JobTensor],
    data: list[memoryview],
) -> jobs.JobItem:
    assert feature.data is not None
    run = _run_of_frames(config) if feature.modality == "image" else 0
    place, mask = feature.mm_position, feature.mm_position.is_embed
    return jobs.JobItem(
        item=feature.identifier,
        modality=feature.modality,
        offset=place.offset,
        length=place.length,
        fields={
            name: _pack(element.field.reduce_data([element]), tensors, data, run, 0)
            for name, element in feature.data.items()
        },
        embeds=b"" if mask is None else mask.to(torch.uint8).numpy().tobytes(),
    )


def _run_of_frames(config: VllmConfig) -> int:
    """Return how many elements of a patch one frame has, for models that take pairs of frames."""
    vision = getattr(config.model_config.hf_config, "vision_config", None)
    if getattr(vision, "temporal_patch_size", 1) != 2:
        return 0
    return int(getattr(vision, "patch_size", 0)) ** 2


def _pack(
    value: Any, tensors: list[jobs.JobTensor], data: list[memoryview], run: int, depth: int
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
            found = jobs.JobTensor(
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


class JobReader:
    """Makes an engine's requests of jobs.

    The model's processor is loaded here, before the engine is ready.

    Args:
        role: Of the engine; other jobs are refused.

    Attributes:
        resets: A prompt shares no KV with those before it was changed.
    """

    def __init__(self, config: VllmConfig, role: Role) -> None:
        self._config = config
        self._role = role
        self.resets = 0
        model = config.model_config
        self._samples: dict[str, dict[str, Any]] = {}
        if model.is_multimodal_model:
            self._processor = MULTIMODAL_REGISTRY.create_processor(model)
            self._samples = compat.sample_items(config, self._processor)
        self._metadata = ItemMetadata(config)
        self._most_tokens = model.max_model_len
        self._words = model.get_vocab_size()
        self._most_embeds = config.scheduler_config.encoder_cache_size
        vision = getattr(model.hf_config, "vision_config", None)
        self._merge = int(getattr(vision, "spatial_merge_size", 0) or 0)
        self._loras: dict[jobs.JobLora, int] = {}

    def request(self, job: jobs.Job, data: np.ndarray[Any, Any], arrival_time: float) -> Any:
        """Return a job as the engine takes it.

        Args:
            data: Of its tensors, as bytes; the request may share this memory.

        Raises:
            ProtocolError: The engine could not do it.
        """
        if self._role not in (ENCODES if isinstance(job, jobs.EncodeJob) else SENDS_KV):
            raise ProtocolError(f"{type(job).__name__}: this engine has the role {self._role}")
        begins, _ = jobs.offsets(job.tensors)
        tensors = [
            _tensor(each, data[begin : begin + each.nbytes])
            for each, begin in zip(job.tensors, begins, strict=True)
        ]
        others: dict[str, Any] = {
            "arrival_time": arrival_time,
            "lora_request": self._lora(job.lora),
            "priority": job.priority,
            "trace_headers": job.trace_headers or None,
        }
        if isinstance(job, jobs.EncodeJob):
            tokens = self._tokens(job, tensors[0], self._most_tokens)
            if [(each.offset, each.length) for each in job.items] != [(0, len(tokens))]:
                raise ProtocolError(f"an encode job of {len(job.items)} items in other places")
            feature = self._feature(job.items[0], tensors, bare=False)
            return encode_request(job.job, tokens, feature, job.transfer, **others)
        # The engine generates a token.
        tokens = self._tokens(job, tensors[0], self._most_tokens - 1)
        names = {each.item for each in job.items}
        brought = {each.item_uuid: each for each in job.expected}
        if len(brought) < len(job.expected) or not brought.keys() <= names:
            raise ProtocolError("expected items: each once, and in the prompt")
        bare = {name for name, each in brought.items() if not each.media}
        features = [self._feature(each, tensors, bare=each.item in bare) for each in job.items]
        params = PrefillParams(transfers=job.expected, sample=job.sample)
        sampling = prefill_sampling(params if job.expected or job.sample else None)
        # vLLM's own reset fails while blocks are in use, as those of other fronts always are.
        salt = f"{self.resets} {job.cache_salt or ''}" if self.resets else job.cache_salt
        return request_of(job.job, tokens, features, sampling, cache_salt=salt, **others)

    def _lora(self, lora: jobs.JobLora | None) -> LoRARequest | None:
        if lora is None:
            return None
        if self._config.lora_config is None:
            raise ProtocolError(
                f"adapter {lora.name!r}: this engine serves none. Set engine_args.enable_lora as "
                "at the front"
            )
        # Fronts number theirs by themselves, and may give one name to several.
        number = self._loras.setdefault(lora, len(self._loras) + 1)
        return LoRARequest(f"{lora.name} {lora.path}", number, lora.path)

    def _tokens(self, job: jobs.Job, ids: torch.Tensor, most: int) -> list[int]:
        if ids.dtype != torch.int32 or ids.ndim != 1 or not 0 < len(ids) <= most:
            raise ProtocolError(
                f"token ids {tuple(ids.shape)} of {ids.dtype}: at most {most} of int32, by "
                f"max_model_len of {self._most_tokens}"
            )
        text, end = torch.ones(len(ids), dtype=torch.bool), 0
        for each in job.items:
            if each.offset < end or each.offset + each.length > len(ids):
                raise ProtocolError(
                    f"item {each.item} at {each.offset}, {each.length} places: in their order, "
                    f"within {len(ids)} tokens"
                )
            end = each.offset + each.length
            text[each.offset : end] = False  # Placeholders may be words of none.
        words = ids[text]
        if len(words) and not 0 <= int(words.min()) <= int(words.max()) < self._words:
            raise ProtocolError(f"token ids: the model has those from 0 to {self._words - 1}")
        found: list[int] = ids.tolist()
        return found

    def _feature(
        self, item: jobs.JobItem, tensors: Sequence[torch.Tensor], *, bare: bool
    ) -> MultiModalFeatureSpec:
        sample = self._samples.get(item.modality)
        if sample is None:
            raise ProtocolError(
                f"{item.modality}: the model takes {', '.join(self._samples) or 'no media'}"
            )
        if bare:
            wanted = self._metadata.fields(item.modality)
            sample = {name: each for name, each in sample.items() if name in wanted}
        if item.fields.keys() != sample.keys():
            raise ProtocolError(
                f"fields {', '.join(item.fields)}: {', '.join(sample)} here. Run releases of vLLM "
                "at front and engine that process this model's items equally"
            )
        places = self._places(item)
        given = {name: _unpack(value, tensors, 0) for name, value in item.fields.items()}
        for name, value in given.items():
            _compare(name, value, sample[name])
        try:
            fields = self._processor._get_mm_fields_config(given, {})
            items = MultiModalKwargsItems.from_hf_inputs(given, fields)[item.modality]
        except Exception as error:  # Any exception of a model's own code.
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
            data=items[0], modality=item.modality, identifier=item.item, mm_position=places
        )

    def _places(self, item: jobs.JobItem) -> PlaceholderRange:
        count, mask = item.length, None
        if item.embeds:
            if len(item.embeds) != count or not any(item.embeds):
                raise ProtocolError(f"embeds of {len(item.embeds)} places: {count}, some not 0")
            mask = torch.frombuffer(bytearray(item.embeds), dtype=torch.uint8).bool()
        places = PlaceholderRange(item.offset, count, mask)
        if (embeds := places.get_num_embeds()) > self._most_embeds:
            raise ProtocolError(
                f"{embeds} embeddings: the encoder cache takes {self._most_embeds}. Raise "
                "engine_args.max_num_batched_tokens of the engine's group"
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


def _tensor(spec: jobs.JobTensor, data: np.ndarray[Any, Any]) -> torch.Tensor:
    if spec.repeats > 1:
        # numpy, as torch would start threads next to the engine's.
        runs = data.view(f"V{spec.run * jobs.JOB_DTYPES[spec.dtype]}")
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
            "here. Run releases of vLLM at front and engine that process this model's items equally"
        )
    if value.ndim == 2 and value.shape[1] != sample.shape[1]:
        raise ProtocolError(f"{name} of width {value.shape[1]}: {sample.shape[1]} here")
