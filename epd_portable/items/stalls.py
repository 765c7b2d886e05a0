"""PD scheduler: the deadline of claims, in every state, where nothing else has one.

A second line of defence. Transfers have deadlines of their own, and the order of claims
(`epd_portable.items.room`) is made so that every claim is served. If that is not true
in some case, one request would wait for ever, and with it every request behind it.
"""

from __future__ import annotations

from collections.abc import Callable

from epd_portable.items import room
from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.slots import ReceivePool
from epd_portable.items.table import ItemRequest

LOOK_EVERY_S = 1.0
LONGEST_STEP_S = 1.0
"""A step counts for no longer: an engine that is slow, or stood still, has not waited for items."""
AGAIN_S = 5.0
"""After a request was ended, until the next one is if there still is no progress."""
ENCODING_FACTOR = 10
"""The limit is so much longer while items are encoded in the background: that is never stopped."""
MAX_DESCRIBED = 20
"""Items and requests in a description."""


class StallWatch:
    """Finds requests whose items make no progress.

    The clock runs while requests are *blocked*, which need an item that is neither here nor to be
    encoded by themselves, and nothing makes progress: no item comes, no request with items
    computes, and none could if the engine ran it in place of requests that compute. Long queues are
    no stall, nor are long responses.

    Args:
        able: Returns whether a request could compute, or would be failed, if the engine ran it now.
        limit_s: Longest time without progress.
    """

    def __init__(
        self,
        cache: PrefillEncoderCache,
        able: Callable[[ItemRequest], bool],
        *,
        limit_s: float,
    ) -> None:
        self._cache = cache
        self._able = able
        self.limit_s = limit_s
        self._now = 0.0
        self._unlooked_s = 0.0
        self._stalled_s = 0.0
        self._progress = -1
        self._computed = False

    def look(self, now: float, *, computed: bool, starts: bool) -> ItemRequest | None:
        """Return the first request whose wait is to be ended, if there is one.

        Args:
            computed: The last step had tokens.
            starts: Requests are started; otherwise (a pause) only those that run can go on.
        """
        self._unlooked_s += min(now - self._now, LONGEST_STEP_S)
        self._now = now
        self._computed |= computed
        if self._unlooked_s < LOOK_EVERY_S:
            return None
        passed_s, self._unlooked_s = self._unlooked_s, 0.0
        computed, self._computed = self._computed, False
        contenders = [each for each in room.contenders(self._cache) if starts or each.running]
        able = [each for each in contenders if self._able(each)]
        blocked = [each for each in contenders if each not in able]
        moved = self._progress != self._cache.progress
        self._progress = self._cache.progress
        if moved or not blocked or (able and computed):
            self._stalled_s = 0.0
            return None
        self._stalled_s += passed_s
        limit_s = self.limit_s * (ENCODING_FACTOR if self._cache.encodes_in_background else 1)
        if self._stalled_s < limit_s:
            return None
        found = next((each for each in blocked if each.arrived_s <= now - self.limit_s), None)
        if found is not None:
            self._stalled_s = limit_s - AGAIN_S
        return found


def describe(cache: PrefillEncoderCache, pool: ReceivePool) -> str:
    """Return the state of items and of the requests that contend for space, for the log."""
    items = [
        f"{each.mm_hash} ({each.num_embeds}, {each.state.name}, held by "
        f"{sorted(each.holders)}, pending for {sorted(each.pending)}, transfers "
        f"{ {key: transfer.progress for key, transfer in each.transfers.items()} })"
        for each in list(cache.items.values())[:MAX_DESCRIBED]
    ]
    requests = [
        f"{each.request_id} ({'runs' if each.running else 'waits'} at "
        f"{each.num_computed_tokens}, claims "
        f"{ {key: claim.place for key, claim in each.claims.items()} })"
        for each in room.contenders(cache)[:MAX_DESCRIBED]
    ]
    return (
        f"encoder cache {cache.num_free_slots} free and {cache.num_freeable_slots} freeable of "
        f"{cache.cache_size}; receive pool {pool.free_bytes} free of {pool.capacity_bytes} bytes; "
        f"{len(cache.items)} items: {'; '.join(items)}; requests: {'; '.join(requests)}"
    )
