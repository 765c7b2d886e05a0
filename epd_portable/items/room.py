"""Space for claims of a prefill+decode engine: pure functions over its table.

*Position*: claims of running requests come before those of waiting ones, in order of arrival within
each, and within a request in the order of the prompt. The pending claim at the first position is
served next, and no claim is served before it but those that need no space (`hold_if_last`). A
request thus holds a run of its items from the one that it needs next. When its progress goes back,
or an item is lost, `beyond_gap` is released.

*Every claim is served.* Let F be the first pending claim, of request f. Requests before f pend on
nothing. (1) If one of them, or one behind, holds space, pends on nothing and can compute, or has a
place to compute in (`is_about_to_compute`), it releases its space. (2) Otherwise each claim behind
F gives its space up, the last first (`claim_to_preempt`): nothing else computes with it. Items that
are written, encoded or sent to another engine end by their deadlines. (3) Then only f holds space,
all of it before F, and f may run (`may_start`): it computes what it holds, releases it, and F is
served. A start for text alone, which is held back while others compute, would release no space.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from epd_portable.items.table import COMPUTED, UNDER_WAY, Claim, ItemRequest

if TYPE_CHECKING:
    from epd_portable.items.encoder_cache import PrefillEncoderCache

Rank = tuple[bool, int]
"""Place of a request among all: the smaller comes first."""
Position = tuple[Rank, int]
"""Place of a claim among all: the smaller comes first."""


def rank(request: ItemRequest) -> Rank:
    """Return a request's place among all; running requests come first."""
    return (not request.running, request.number)


def position(claim: Claim) -> Position:
    """Return a claim's place among all."""
    return (rank(claim.request), claim.place)


class PendingClaims:
    """Pending claims by `position`.

    A claim is added whenever its position changes; entries of former positions, and of claims that
    are not pending any more, are skipped and dropped in time.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Position, int, Claim]] = []
        self._numbers = itertools.count()
        self._bound = 64

    def add(self, claim: Claim) -> None:
        """Add a claim at its position, if it is pending."""
        if not claim.is_pending:
            return
        if len(self._entries) > self._bound:
            self._entries = [each for each in self._entries if _is_current(each)]
            heapq.heapify(self._entries)
            self._bound = 2 * len(self._entries) + 64
        heapq.heappush(self._entries, (position(claim), next(self._numbers), claim))

    @property
    def first(self) -> Claim | None:
        """The claim that is served next; ``None`` if none is pending."""
        while self._entries and not _is_current(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][-1] if self._entries else None


def _is_current(entry: tuple[Position, int, Claim]) -> bool:
    return entry[-1].is_pending and entry[0] == position(entry[-1])


def beyond_gap(request: ItemRequest) -> list[Claim]:
    """Return served claims of a request behind its first pending one.

    An item that the request has computed once, and needs again, is not among them.
    """
    gap = min((each.place for each in request.claims.values() if each.is_pending), default=COMPUTED)
    return [
        each
        for each in request.claims.values()
        if gap < each.place < COMPUTED and each.is_served and each.place == min(each.inputs)
    ]


def may_start(table: PrefillEncoderCache, request: ItemRequest) -> bool:
    """Return whether a waiting request may run: it pends on nothing, or is the first that does.

    The first runs only if no other waiting request holds all that it needs: that one might not find
    a place among the running requests then.
    """
    first = table.pending.first
    if first is None or first.request is not request:
        return not request.is_pending
    others = (each for each in table.with_space.values() if each is not request)
    return all(each.running or each.is_pending for each in others)


def is_about_to_compute(request: ItemRequest, first: ItemRequest) -> bool:
    """Return whether a request will compute, and release space, however the first ends."""
    return not request.is_pending and (request.running or not first.running)


def claim_to_preempt(table: PrefillEncoderCache, first: Claim) -> Claim | None:
    """Return the claim that gives its space to the first pending one.

    ``None`` if space comes back without that, or none of the claims behind can give it.
    """
    item = first.item
    if first.by_transfer and table.num_freeable_slots >= item.num_embeds and table.slot_returns:
        return None
    if any(is_about_to_compute(each, first.request) for each in table.with_space.values()):
        return None
    if any(not each.holders <= table.requests.keys() for each in table.items.values()):
        return None  # A transfer to another engine holds space, until its deadline.
    behind = [
        claim
        for request in table.with_space.values()
        for claim in request.claims.values()
        if claim.is_served
        and claim.item.state not in UNDER_WAY
        and position(claim) > position(first)
    ]
    return max(behind, key=position, default=None)


def contenders(table: PrefillEncoderCache) -> list[ItemRequest]:
    """Return requests that hold items, and the first that pends on some; by rank."""
    found, first = dict(table.with_space), table.pending.first
    if first is not None:
        found[first.request.request_id] = first.request
    return sorted(found.values(), key=rank)
