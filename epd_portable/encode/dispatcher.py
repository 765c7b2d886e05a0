"""Encode scheduler: which item goes to which consumer, and how long its space is reserved."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from epd_portable.config.secret import Secret
from epd_portable.encode.producer import TransferOrder
from epd_portable.items.prompt import engine_names
from epd_portable.items.table import Item, ItemTable
from epd_portable.log import trace
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import EncodeParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item of an encode job, as its engine names it; ``tensor`` is what becomes of it.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
    """

    mm_hash: str
    modality: str
    tensor: TensorSpec


class Dispatcher:
    """Turns encode requests into transfer orders when their items get space.

    An item's space in the encoder cache is reserved for its transfer beyond the end of the request:
    the request is finished once its items are encoded, the transfer when the consumer confirms it.

    Args:
        secret: Of the deployment; a front proves with it that it ordered a transfer.
    """

    def __init__(self, cache: ItemTable, secret: Secret) -> None:
        self._cache = cache
        self._secret = secret
        self._waiting: dict[str, list[TransferOrder]] = {}
        """Orders whose items have no space, by request."""
        self._under_way: dict[str, tuple[str, Item]] = {}
        """Consumer and item of each transfer."""
        self._preempted: set[str] = set()
        """Transfers under way that end unless their consumers have space."""

    @property
    def busy(self) -> bool:
        """Return whether transfers are under way; a step reports which of them have ended."""
        return bool(self._under_way)

    def kept(self) -> Set[tuple[str, Item]]:
        """Return the consumers with the items whose space transfers to them keep."""
        return {
            (consumer, item)
            for transfer_id, (consumer, item) in self._under_way.items()
            if transfer_id in item.holders
        }

    def request_arrived(
        self,
        request_id: str,
        items: Sequence[EncodedItem],
        params: EncodeParams,
    ) -> None:
        """Remember which consumers the items of a request are for, each with its output.

        A transfer that no front has signed is not delivered: a request could name any address.
        """
        distinct = {item.mm_hash: item for item in items}
        names = engine_names([(each.mm_hash, each.modality) for each in items], params.transfers)
        orders = []
        for transfer in params.transfers:
            item = distinct.get(names.get(transfer.item_uuid, ""))
            if item is None:
                logger.warning(
                    "request %s names %d transfers but has %d items: %s is not delivered",
                    request_id,
                    len(params.transfers),
                    len(distinct),
                    transfer.transfer_id,
                )
                continue
            if not self._secret.verify_transfer(
                transfer.proof, transfer.transfer_id, transfer.item_uuid, transfer.consumer
            ):
                logger.warning(
                    "request %s: transfer %r to %r has no valid proof: it is not delivered; do "
                    "both have the same secret_file?",
                    request_id,
                    transfer.transfer_id,
                    transfer.consumer,
                )
                continue
            orders.append(
                TransferOrder(
                    transfer_id=transfer.transfer_id,
                    mm_hash=item.mm_hash,
                    consumer=transfer.consumer,
                    tensor=item.tensor,
                    item_uuid=transfer.item_uuid,
                    proof=transfer.proof,
                    kind=transfer.modality,
                    modality=item.modality,
                )
            )
        if orders:
            self._waiting[request_id] = orders

    def request_finished(self, request_id: str) -> list[TransferOrder]:
        """End a request; return its orders that never got space, and keep none."""
        return self._waiting.pop(request_id, [])

    def consumer(self, request_id: str) -> str:
        """Return the consumer of a request's items, of several the first; empty for none."""
        return min((order.consumer for order in self._waiting.get(request_id, ())), default="")

    def repeats(self, request_id: str) -> bool:
        """Return whether a transfer of a request is under way from before, or not reported yet."""
        orders = self._waiting.get(request_id, ())
        return any(order.transfer_id in self._under_way for order in orders)

    def take_orders(self, scheduled: Iterable[str]) -> list[TransferOrder]:
        """Return the orders whose items got space by this step, for the worker."""
        taken = []
        for request_id in scheduled:
            orders = self._waiting.get(request_id)
            if not orders:
                continue
            ready = [each for each in orders if request_id in self._cache.holders(each.mm_hash)]
            for order in ready:
                orders.remove(order)
                if order.transfer_id in self._under_way:
                    logger.warning("transfer %s is under way already", order.transfer_id)
                    continue
                taken.append(order)
                item = self._cache.items[order.mm_hash]
                self._under_way[order.transfer_id] = (order.consumer, item)
                self._cache.hold(item, order.transfer_id)
                trace("transfer.ordered", transfer=order.transfer_id, mm_hash=order.mm_hash)
        return taken

    def preempt(self, num_embeds: Mapping[str, int]) -> list[str]:
        """Preempt transfers whose ends free so much space, by consumer; the youngest first.

        Returns:
            Those that were not preempted before.
        """
        left, found = Counter(num_embeds), []
        for transfer_id, (consumer, item) in reversed(self._under_way.items()):
            if left[consumer] > 0 and {transfer_id} <= item.holders <= self._under_way.keys():
                if transfer_id not in self._preempted:
                    self._preempted.add(transfer_id)
                    found.append(transfer_id)
                if item.holders <= self._preempted:
                    left[consumer] -= item.num_embeds
        return found

    def reset(self) -> None:
        """Reset with the encoder cache: workers send nothing of before, and report no end of it."""
        self._under_way.clear()
        self._preempted.clear()

    def transfers_ended(self, transfer_ids: Iterable[str]) -> Set[str]:
        """Release the space of items whose transfers have ended, well or not.

        Returns:
            Consumers of those that were not preempted.
        """
        consumers = set()
        for transfer_id in self._under_way.keys() & set(transfer_ids):
            consumer, item = self._under_way.pop(transfer_id)
            self._cache.release(item, transfer_id)
            if transfer_id not in self._preempted:
                consumers.add(consumer)
            self._preempted.discard(transfer_id)
        return consumers
