"""Work of the workers in each step, and the slots that it frees."""

from __future__ import annotations

from collections.abc import Iterable

from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.placer import Placement, WorkerOrders
from epd_portable.items.table import Item, State

_IDLE = {computes: WorkerOrders(computes=computes) for computes in (False, True)}
"""Orders of steps in which no item comes or goes, by whether they have tokens."""


class OrderBook:
    """Orders of the scheduler for its workers, step by step.

    Args:
        cache: The table, with its slots.
        copies: Whether workers copy items out of their slots. If not, a slot is kept as long as
            its item is in the encoder cache.
    """

    def __init__(self, cache: PrefillEncoderCache, *, copies: bool) -> None:
        self._cache = cache
        self._copies = copies
        self._placements: list[tuple[Item, Placement]] = []
        self._unread: set[str] = set()
        """Placed in steps without tokens, at whose end not all ranks need have read."""
        self._scheduled = self._ended = 0
        """Steps."""

    def place(self, item: Item, placement: Placement) -> None:
        """Have workers put an item that has landed into their encoder caches."""
        self._placements.append((item, placement))

    def take_orders(self, freed: Iterable[str], *, computes: bool) -> WorkerOrders:
        """Return the work of the workers in the step that was just scheduled.

        Items that workers copy are placed in the next step of any kind, so that the copy begins at
        once. Their slots are free when a step that computes has ended since, because that waits for
        the copies in all ranks; or, if an item was evicted before, when the workers forget it: no
        step computes with what they read of its slot from then on.

        Slots that producers have released pass through the workers, too, which may be about to
        write them, and are free when this step has ended.

        Args:
            freed: Items that the workers forget in that step.
            computes: The step has tokens.
        """
        self._scheduled += 1
        unused = list(freed)
        encodings, self._cache.encodings = self._cache.encodings, []
        if unused and encodings:
            # Workers may encode before they forget: these wait for the next step.
            self._cache.encodings = [each for each in encodings if each.mm_hash in unused]
            encodings = [each for each in encodings if each.mm_hash not in unused]
        pool = self._cache.pool
        if not (unused or self._placements or self._unread or pool.retiring):
            if not encodings:
                return _IDLE[computes]
            return WorkerOrders(encodings=encodings, computes=computes)
        placements = self._take_placements(computes=computes)
        released = pool.pass_on(self._scheduled)
        if self._copies:
            self._unread.difference_update(unused)
            self._unread.update(placement.mm_hash for placement in placements)
            if computes:
                unused += self._unread
                self._unread.clear()
        for mm_hash in unused:
            self._cache.retire(mm_hash)
        pool.pass_on(self._scheduled)
        return WorkerOrders(
            placements=placements,
            revoked=[slot.descriptor.generation for slot in released],
            encodings=encodings,
            computes=computes,
        )

    def step_done(self) -> None:
        """Note that the oldest step under way has ended, and free its slots."""
        if self._ended < self._scheduled:
            self._ended += 1
            self._cache.step_ended(self._ended)

    def _take_placements(self, *, computes: bool) -> list[Placement]:
        """Return the placements of items that have landed and were not evicted since."""
        placements: list[Placement] = []
        waiting: list[tuple[Item, Placement]] = []
        for item, placement in self._placements:
            if item.state is not State.LANDED:
                continue
            if computes or self._copies:
                self._cache.placed(item)
                placements.append(placement)
            else:
                waiting.append((item, placement))
        self._placements = waiting
        return placements
