"""Media of items that workers lack when a step encodes the items after all.

vLLM leaves the media of items out of a request that it sends to workers if a prefix hit covers them
(``strip_covered_mm_data``, 0.29 to 0.33). When the engine preempts the request or cannot load its
KV, and the prefix and the encoder output are evicted, a step encodes such an item. vLLM's first
model runner never gets the media then, its second from 0.33 on (``encoder_input_updates``), or
after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from epd_portable.vllm_plugin.reports import ItemMedia


class MediaOfWorkers:
    """Items of requests that workers have without their media.

    Args:
        requests: The scheduler's, by id; each has the media of all its items.
    """

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests
        self._missing: dict[str, set[int]] = {}
        self._encoded: list[tuple[str, int]] = []

    def encodes(self, request_id: str, index: int) -> None:
        """Note that the step that is being scheduled encodes an item."""
        self._encoded.append((request_id, index))

    def missing(self, sent: Iterable[Any]) -> list[ItemMedia]:
        """Return what workers lack for the step; ``sent`` are vLLM's ``NewRequestData`` in it."""
        for new in sent:
            pairs = zip(new.mm_features, self._requests[new.req_id].mm_features, strict=True)
            left_out = {i for i, (there, here) in enumerate(pairs) if there.data is not here.data}
            if left_out:
                self._missing[new.req_id] = left_out
            else:
                self._missing.pop(new.req_id, None)
        encoded, self._encoded = self._encoded, []
        found = []
        for request_id, index in encoded:
            if index in self._missing.get(request_id, ()):
                self._missing[request_id].discard(index)
                data = self._requests[request_id].mm_features[index].data
                found.append(ItemMedia(request_id=request_id, index=index, data=data))
        return found

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._missing.pop(request_id, None)
