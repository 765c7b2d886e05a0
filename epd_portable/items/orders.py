"""What the workers must do in each step, and which slots that frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from epd_portable.items.items import Item, State
from epd_portable.items.placer import EncodeOrder, Placement, WorkerOrders
from epd_portable.items.preallocator import EncoderCachePreallocator
from epd_portable.wire.descriptors import SlotDescriptor


class OrderBook:
    """Takes slots from *landed* or *taken back* through the workers until they are free.

    Args:
        cache: Keeps the slots of items that workers may read, and gets those that are free.
        copies: Whether workers copy items out of their slots. If not, a slot is kept as long as
            its item is in the encoder cache.
    """

    def __init__(self, cache: EncoderCachePreallocator, *, copies: bool) -> None:
        self._cache = cache
        self._copies = copies
        self._placements: list[tuple[Item, Placement]] = []
        self._unread: set[str] = set()
        """Placed in steps without tokens, at whose end not all ranks need have read."""
        self._taken_back: list[SlotDescriptor] = []
        self._encodings: list[EncodeOrder] = []
        self._under_way: deque[list[SlotDescriptor]] = deque()
        """Slots that are free when a step has ended."""

    def place(self, item: Item, placement: Placement) -> None:
        """An item has landed: workers put it into their encoder caches."""
        self._placements.append((item, placement))

    def take_back(self, slot: SlotDescriptor) -> None:
        """A slot that a producer had cannot be written any more."""
        self._taken_back.append(slot)
        self._cache.taken_back()

    def encode(self, encoding: EncodeOrder) -> None:
        """An item has room: workers encode it in the background."""
        self._encodings.append(encoding)

    def take_orders(self, freed: Iterable[str], *, computes: bool) -> WorkerOrders:
        """Return what the workers must do in the step that was just scheduled.

        Items that workers copy are placed in whatever step comes next, so that the copy begins at
        once. Their slots are free when a step that computes has ended since, because that waits for
        the copies in all ranks; or, if an item was evicted before, when the workers forget it: no
        step computes with what they read of its slot from then on.

        Slots that were taken back from their producers pass through the workers too, which may be
        about to write them, and are free when this step has ended.

        Args:
            freed: Items that the workers forget in that step.
            computes: The step has tokens.
        """
        unused = list(freed)
        # Workers may encode before they forget: these wait for the next step.
        encodings = [each for each in self._encodings if each.mm_hash not in unused]
        self._encodings = [each for each in self._encodings if each.mm_hash in unused]
        if not (unused or self._placements or self._unread or self._taken_back):
            self._under_way.append([])
            return WorkerOrders(encodings=encodings, computes=computes)
        placements = self._take_placements(computes=computes)
        taken_back, self._taken_back = self._taken_back, []
        if self._copies:
            self._unread.difference_update(unused)
            self._unread.update(placement.mm_hash for placement in placements)
            if computes:
                unused += self._unread
                self._unread.clear()
        slots = [self._cache.retire(mm_hash) for mm_hash in unused]
        self._under_way.append([*taken_back, *(slot for slot in slots if slot is not None)])
        return WorkerOrders(
            placements=placements,
            revoked=[slot.generation for slot in taken_back],
            encodings=encodings,
            computes=computes,
        )

    def step_done(self) -> None:
        """The oldest step under way has ended: what it made the workers forget is read no more."""
        if not self._under_way:
            return
        self._cache.give_back(self._under_way.popleft())

    def _take_placements(self, *, computes: bool) -> list[Placement]:
        """Return what the step places of what has landed and was not evicted since."""
        placements: list[Placement] = []
        waiting: list[tuple[Item, Placement]] = []
        for item, placement in self._placements:
            if item.state is not State.LANDED:
                continue
            if computes or self._copies:
                item.state = State.PRESENT
                placements.append(placement)
            else:
                waiting.append((item, placement))
        self._placements = waiting
        return placements
