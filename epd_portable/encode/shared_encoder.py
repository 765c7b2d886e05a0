"""PD scheduler: items that the instance encodes for others, between those of its own requests.

Every instance with the encoder accepts encode jobs. vLLM's scheduler never sees one: it has no
KV and no tokens. Its items claim space like those of requests, in the one order of arrival
(`epd_portable.items.room`), workers encode them, and their space is reserved for transfers
as on an encode instance. Three rules keep instances that encode for each other from waiting for
each other:

- Transfers to others keep no more than half of the encoder cache.
- A job waits for no instance: what another instance is to bring here is not passed on.
- A consumer is notified at once that a promised item does not come, and encodes it itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from epd_portable.encode.dispatcher import Dispatcher
from epd_portable.encode.producer import TransferOrder
from epd_portable.items.encoder_cache import PrefillEncoderCache
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.table import ItemRequest, PromptItem, State
from epd_portable.log import trace

logger = logging.getLogger(__name__)

_COMES_FROM_ELSEWHERE = (State.RESERVED, State.GRANTED, State.LANDED)


class SharedEncoder:
    """Encode jobs of a PD instance, one after the other; called by the engine, under the lock.

    Args:
        dispatcher: Knows whom the items of each job are for; has had each job before `arrived`.
    """

    def __init__(
        self, dispatcher: Dispatcher, requests: PrefillRequests, cache: PrefillEncoderCache
    ) -> None:
        self._dispatcher = dispatcher
        self._requests = requests
        self._cache = cache
        self._waiting: dict[str, Sequence[PromptItem]] = {}
        self._current: ItemRequest | None = None
        self._tried = False
        """An item of the current job was to be encoded once more."""
        self._orders: list[TransferOrder] = []
        self._ended: list[str] = []

    def arrived(self, request_id: str, items: Sequence[PromptItem]) -> None:
        """Add a job that was sent to the instance."""
        self._waiting[request_id] = items

    def withdraw(self, request_id: str) -> None:
        """Cancel a job that no request waits for any more."""
        self._waiting.pop(request_id, None)
        if request_id in self._ended:
            self._ended.remove(request_id)
        self._leave(request_id)

    def fail(self, request_id: str, reason: str) -> None:
        """End a job whose items will not come."""
        if self._current is not None and self._current.request_id == request_id:
            self._end(request_id, reason)

    def advance(self, *, waits: bool = True) -> None:
        """Prepare a step: end the job whose items are there, and begin others.

        Args:
            waits: Jobs wait for space. In a pause in which nothing runs no space is released, and
                a job without space fails.
        """
        while (job := self._current) is not None or self._begin_next():
            if job is not None:
                if (end := self._find_end(job, waits)) is None:
                    return
                self._end(job.request_id, end)

    def take_orders(self) -> list[TransferOrder]:
        """Return what the worker is to send from this step on.

        What it does not have by then it never will: its consumer is notified.
        """
        orders, self._orders = self._orders, []
        return orders

    def take_ended(self) -> list[str]:
        """Return the jobs that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --------------------------------------------------------------------------------------------

    def _begin_next(self) -> bool:
        """Let the first job that waits claim its space; return whether there was one."""
        if not self._waiting:
            return False
        request_id, items = next(iter(self._waiting.items()))
        size = sum({each.mm_hash: each.num_embeds for each in items}.values())
        most = self._cache.cache_size // 2
        kept = sum(item.num_embeds for _, item in self._dispatcher.kept())
        if size <= most < kept + size or self._dispatcher.repeats(request_id):
            return False
        del self._waiting[request_id]
        self._tried = False
        if size > most:
            reason = f"it has {size} encoder embeddings, and half of the encoder cache is {most}"
        elif not all(each.has_media and each.media for each in items):
            reason = "the instance has no encoder, or not the media"
        else:
            reason = "an item of another size has its name"
            self._current = self._requests.encode_for_others(request_id, items)
        if self._current is None:
            self._end(request_id, reason)
        return True

    def _find_end(self, job: ItemRequest, waits: bool) -> str | None:
        """Return why a job fails, empty if its items are there; ``None`` if it continues.

        An item that a step was to encode is encoded in the background: the step may never come.
        """
        for claim in job.claims.values():
            item = claim.item
            if item.state in _COMES_FROM_ELSEWHERE:
                return "another instance is to bring its item"
            if not claim.is_served:
                return None if waits else "the instance is paused, and has no space"
            if item.state is State.LOCAL:
                if self._tried or not self._cache.encode_in_background(claim):
                    return "its item could not be encoded"
                self._tried = True
            if item.state is not State.PRESENT:
                return None
        return ""

    def _end(self, request_id: str, reason: str) -> None:
        """Send the items of a job, or have its transfers fail for a reason."""
        if reason:
            logger.warning("encode job %s is given up: %s", request_id, reason)
            self._orders += self._dispatcher.request_finished(request_id)
        else:
            self._orders += self._dispatcher.take_orders([request_id])
        self._leave(request_id)
        self._ended.append(request_id)
        trace("encode.finished", request=request_id)

    def _leave(self, request_id: str) -> None:
        if self._current is not None and self._current.request_id == request_id:
            self._cache.leave(self._current)
            self._current = None
        self._dispatcher.request_finished(request_id)
