"""vLLM's requests: their items with and without media, and requests of encode and prefill jobs.

Metadata of an item are the fields that size its place in the prompt.

The front replaces an item's media by its metadata for the engine that does not encode it. vLLM
declares the fields of a model (``MultiModalDataParser.embedding_fields``, by
``PlaceholderMetadataResolver``, 0.31 and later).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from epd_portable.encode.dispatcher import EncodedItem
from epd_portable.errors import ProtocolError
from epd_portable.items.table import PromptItem
from epd_portable.vllm_plugin import compat
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import (
    FIELD,
    EncodeParams,
    EncodeTransfer,
    ParamsT,
    PrefillParams,
    read_params,
    to_params,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

KV = "kv_transfer_params"
"""vLLM's field of ``extra_args`` and of outputs."""
_WANTS_KV = {"do_remote_decode": True, "do_remote_prefill": False}
"""vLLM's parameters of a request whose tokens are generated elsewhere."""


def output_tensor(config: VllmConfig, feature: Any) -> TensorSpec:
    """Return what the encoder makes of a ``MultiModalFeatureSpec``: ``(num_embeds, width)``."""
    width = compat.encoder_output_width(config, feature.modality)
    return TensorSpec(
        shape=(feature.mm_position.get_num_embeds(), width), dtype=compat.dtype_name(config)
    )


def encoded_items(config: VllmConfig, request: Request) -> list[EncodedItem]:
    """Return what an encode job is to encode, in order."""
    return [
        EncodedItem(each.identifier, each.modality, output_tensor(config, each))
        for each in request.mm_features
    ]


def encode_request(
    job: str,
    token_ids: Sequence[int],
    feature: MultiModalFeatureSpec,
    transfer: EncodeTransfer,
    **others: Any,
) -> EngineCoreRequest:
    """Return the request that has one item encoded and brought to its consumer.

    Args:
        token_ids: Of the item's places, which begin at 0.
        others: Further fields of the request.
    """
    params = to_params(EncodeParams(transfers=(transfer,)))
    sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={FIELD: params})
    return request_of(job, token_ids, [feature], sampling, **others)


def prefill_sampling(params: PrefillParams | None = None) -> SamplingParams:
    """Return the parameters of a request that computes a prompt and generates one token.

    Args:
        params: Of items that encode engines bring.
    """
    extra: dict[str, Any] = {KV: {**_WANTS_KV}}
    if params is not None:
        extra[FIELD] = to_params(params)
    return SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, extra_args=extra)


def request_of(
    job: str,
    token_ids: Sequence[int],
    features: list[MultiModalFeatureSpec],
    sampling: SamplingParams,
    *,
    cache_salt: str | None = None,
    **others: Any,
) -> EngineCoreRequest:
    """Return a request of a job."""
    return EngineCoreRequest(
        request_id=job,
        prompt_token_ids=[*token_ids],
        mm_features=features or None,
        sampling_params=sampling,
        pooling_params=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        **others,
    )


def blocks_of(core: EngineCoreRequest, size: int) -> list[int]:
    """Return a prompt as a chain of names of its blocks: equal for a common beginning.

    Args:
        size: Tokens of a block.
    """
    tokens, last, found = core.prompt_token_ids or [], hash(core.cache_salt), []
    items = {each.mm_position.offset: each.identifier for each in core.mm_features or ()}
    for start in range(0, len(tokens) - size + 1, size):
        end = start + size
        names = tuple(name for offset, name in items.items() if start <= offset < end)
        last = hash((last, names, *tokens[start:end]))
        found.append(last)
    return found


def without_items(
    core: EngineCoreRequest, names: Collection[str], words: Callable[[str], list[int]]
) -> EngineCoreRequest:
    """Return a request with a text in the place of some of its items."""
    tokens, features, begin = core.prompt_token_ids or [], [], 0
    prompt: list[int] = []
    for feature in core.mm_features or ():
        place = feature.mm_position
        if feature.identifier in names:
            prompt += tokens[begin : place.offset] + words(f"[{feature.modality} not available]")
            begin = place.offset + place.length
        else:
            offset = len(prompt) + place.offset - begin
            features.append(replace(feature, mm_position=replace(place, offset=offset)))
    changed = copy.copy(core)
    changed.prompt_token_ids = prompt + tokens[begin:]
    changed.mm_features = features or None
    return changed


def put_params(output: Any, params: dict[str, Any] | None) -> None:
    """Put ``ec_transfer_params`` into an ``EngineCoreOutput``."""
    if compat.version() < compat.CARRIES_PARAMS:
        output.kv_transfer_params = params and {**(output.kv_transfer_params or {}), FIELD: params}
    else:
        output.ec_transfer_params = params


def take_params(output: Any) -> Any:
    """Return what `put_params` has put into an output, and remove it there."""
    if compat.version() < compat.CARRIES_PARAMS:
        others = dict(output.kv_transfer_params or {})
        params = others.pop(FIELD, None)
        output.kv_transfer_params = others or None
    else:
        params, output.ec_transfer_params = output.ec_transfer_params, None
    return params


def transfer_params(request: Any) -> dict[str, Any] | None:
    """Return the ``ec_transfer_params`` that came with a request."""
    if compat.version() < compat.CARRIES_PARAMS:
        params = (getattr(request.sampling_params, "extra_args", None) or {}).get(FIELD)
    else:
        params = request.ec_transfer_params
    return params if isinstance(params, dict) else None


def read_transfer_params(kind: type[ParamsT], request: Any) -> ParamsT | None:
    """Return a request's transfer parameters; ``None`` if it has none that can be read."""
    raw = transfer_params(request)
    try:
        return None if raw is None else read_params(raw, kind)
    except ProtocolError as error:
        logger.error("request %s is served without transfer: %s", request.request_id, error)
        return None


class ItemMetadata:
    """The metadata of one model's items.

    The model's processor is loaded here, which takes a second and more.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._declared = compat.metadata_fields(config)

    def has_media(self, feature: Any) -> bool:
        """Return whether a ``MultiModalFeatureSpec`` holds more than metadata.

        Also true where that is unknown because the data are in another process (``None``, or an
        address in shared memory).
        """
        if feature.data is None:
            return True
        keys = set(feature.data.keys())
        return not keys or not keys <= self.fields(feature.modality)

    def without_media(self, feature: Any) -> Any | None:
        """Return a ``MultiModalFeatureSpec`` with metadata only; ``None`` if these are too few."""
        wanted = self.fields(feature.modality)
        if not wanted or not _position_fields(feature.data) <= wanted <= feature.data.keys():
            return None
        data = type(feature.data)({key: feature.data[key] for key in wanted})
        return replace(feature, data=data)

    def prompt_items(self, request: Request, *, with_media: bool) -> list[PromptItem]:
        """Return the items of a prompt, in order.

        Args:
            with_media: They may be encoded here, outside of a step.
        """
        return [
            PromptItem(
                input_id=index,
                mm_hash=feature.identifier,
                begin=feature.mm_position.offset,
                end=feature.mm_position.offset + feature.mm_position.length,
                num_embeds=feature.mm_position.get_num_embeds(),
                tensor=output_tensor(self._config, feature),
                modality=feature.modality,
                has_media=self.has_media(feature),
                media=feature.data if with_media and feature.data else None,
            )
            for index, feature in enumerate(request.mm_features)
        ]

    def fields(self, modality: str) -> set[str]:
        """Return the names of a modality's metadata; empty if its items need their media."""
        return self._declared.get(modality, set())


def _position_fields(data: Any) -> set[str]:
    """Return the fields from which models with positions in several dimensions compute them.

    Qwen2.5-VL places the frames of a video by ``second_per_grid_ts``, which is not among the
    declared fields: without its media, such a video would get other positions.
    """
    return {key for key, element in data.items() if element.field.keep_on_cpu}
