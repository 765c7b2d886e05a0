"""The items of a request, and their metadata: the fields that size an item's place in the prompt.

The front replaces an item's media by its metadata for the engine that does not encode it. vLLM
declares the fields of a model (``MultiModalDataParser.embedding_fields``, by
``PlaceholderMetadataResolver``, 0.31 and later).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from epd_portable.encode.dispatcher import EncodedItem
from epd_portable.items.table import PromptItem
from epd_portable.vllm_plugin import compat
from epd_portable.wire.descriptors import TensorSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


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
