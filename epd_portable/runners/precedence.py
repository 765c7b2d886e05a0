"""PD scheduler: who gives way when an earlier request waits for room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from epd_portable.runners.prompt import RequestRecord
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.scheduling.preallocator import Claim
from epd_portable.wire.descriptors import SlotDescriptor


def make_way(
    claim: Claim[SlotDescriptor],
    requests: Mapping[str, RequestRecord],
    cache: EncoderCacheManager,
) -> None:
    """Take one entry from requests that came after a claim and hold it while they wait for more.

    They would wait for the claim in front of them, and the claim for their entry. They hold it
    again when they are scheduled, or encode the item here if it has gone by then.

    Args:
        claim: Of a request; has no room.
        requests: All of this instance, in the order of their arrival.
        cache: Where the entries are.
    """
    arrived = list(requests)
    first = min(arrived.index(request_id) for request_id, _ in claim.waiting)
    later = frozenset(arrived[first + 1 :])
    for request_id in arrived[first + 1 :]:
        for item in requests[request_id].items:
            holders = cache.holders(item.mm_hash)
            if holders and holders <= later:
                _release(item.mm_hash, (requests[holder] for holder in holders), cache)
                return


def _release(mm_hash: str, holders: Iterable[RequestRecord], cache: EncoderCacheManager) -> None:
    for record in holders:
        for item in record.items:
            if item.mm_hash == mm_hash:
                cache.free_encoder_input(record.request, item.input_id)
