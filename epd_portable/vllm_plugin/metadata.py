"""What an item is without its media: the fields that size its place in the prompt.

An encode instance publishes them (`ItemMetadata.of`), a PD instance tells by them whether a
request holds more of an item than that (`ItemMetadata.has_media`). Which fields these are for a
model is declared by vLLM itself, ``MultiModalDataParser.embedding_fields``, and looked up through
``PlaceholderMetadataResolver`` (0.31 and later).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from epd_portable.vllm_plugin import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_REMEMBERED = 16384
"""Items whose fields are remembered at most: a few numbers each."""


class ItemMetadata:
    """The metadata fields of one engine's items.

    An item that the engine's front end has in a cache may arrive without data; what was seen of
    it earlier is remembered, the latest `MAX_REMEMBERED` items.

    Made before the engine is ready: what is asked about the model is asked here, and no item of a
    request ever waits for it.

    Args:
        vllm_config: Of the engine.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._resolver = compat.metadata_resolver(vllm_config)
        self._declared = compat.metadata_fields(vllm_config, self._resolver)
        self._known: OrderedDict[str, dict[str, list[Any]]] = OrderedDict()

    def of(self, feature: Any) -> dict[str, list[Any]] | None:
        """Return the fields of an item, see `EncodedItem.metadata`.

        Args:
            feature: A ``MultiModalFeatureSpec``.
        """
        wanted = self._fields(feature.modality)
        if not wanted:
            return {}
        if feature.data is not None and not _position_fields(feature.data) <= wanted:
            return {}
        found = compat.item_metadata(feature, self._resolver)
        if wanted <= found.keys():
            self._known[feature.identifier] = found
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        if feature.identifier not in self._known:
            return None
        self._known.move_to_end(feature.identifier)
        return self._known[feature.identifier]

    def has_media(self, feature: Any) -> bool:
        """Tell whether the engine holds more of an item than its metadata: it can be encoded.

        True as well where that is unknown because the data lie in another process (``None``, or
        an address in shared memory).

        Args:
            feature: A ``MultiModalFeatureSpec``.
        """
        if feature.data is None:
            return True
        keys = set(feature.data.keys())
        return not keys or not keys <= self._fields(feature.modality)

    def _fields(self, modality: str) -> set[str]:
        return self._declared.get(modality, set())


def _position_fields(data: Any) -> set[str]:
    """Return the fields that models with positions in several dimensions compute them from.

    Qwen2.5-VL places the frames of a video by ``second_per_grid_ts``, which is not among the
    declared fields: without its media, such a video would be in another place.
    """
    return {key for key, element in data.items() if element.field.keep_on_cpu}
