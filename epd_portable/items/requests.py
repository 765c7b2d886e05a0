"""Requests with items in a prefill+decode engine: items they await, tokens that may be computed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from epd_portable.items import room
from epd_portable.items.metrics import RequestFailure
from epd_portable.items.prompt import match_transfers, metadata_only_items
from epd_portable.items.shell import ItemShell
from epd_portable.items.stalls import StallWatch, describe
from epd_portable.items.table import ItemRequest, PromptItem, State
from epd_portable.log import trace
from epd_portable.wire.params import (
    CacheNews,
    ItemOutcome,
    OutputSample,
    PrefillOutcome,
    PrefillParams,
)

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

logger = logging.getLogger(__name__)


class PrefillRequests:
    """The requests of a PD instance that have items; called by the engine, under the lock.

    Args:
        shell: Brings the items, and has the encoder cache.
        lookahead: Tokens beyond those it computes whose items the engine needs
            (speculative decoding; vLLM's ``num_prefill_lookahead``).
        min_start_tokens: See `PlatformTraits`.

    Attributes:
        held_back: Requests that were not started for a few tokens since the engine was last idle.
    """

    def __init__(
        self,
        config: InstanceConfig,
        shell: ItemShell,
        *,
        lookahead: int = 0,
        min_start_tokens: int = 0,
    ) -> None:
        self._config = config
        self._shell = shell
        self._cache = shell.cache
        self._records = shell.cache.requests
        self._lookahead = lookahead
        self._min_start_tokens = min_start_tokens
        self._is_busy = False
        self.held_back: dict[str, None] = {}
        self._numbers = itertools.count()
        self._unavailable: set[str] = set()
        self._refused: dict[str, str] = {}
        self._sampled: dict[str, set[str]] = {}
        """Items of whose outputs a front awaits a sample, by request."""
        self._samples: dict[str, OutputSample] = {}
        self._sleepers: list[str] = []
        self._has_front = False
        self._next_look_s = 0.0
        self._watch = StallWatch(shell.cache, self._is_able, limit_s=2 * config.wait_timeout_s)

    def arrived(
        self, request_id: str, items: Sequence[PromptItem], params: PrefillParams | None
    ) -> None:
        """Add a request with media, which was added to the scheduler.

        It claims its items, in the order of the prompt. Those with a transfer are expected; the
        rest is encoded here, unless another request already awaits the same item. What cannot be
        encoded here (no media in the request, or no encoder) never is.
        """
        transfers = match_transfers(items, params)
        record = ItemRequest(
            request_id,
            next(self._numbers),
            items=items,
            transfers=transfers,
            arrived_s=self._shell.clock(),
            metadata_only=metadata_only_items(items, transfers, can_encode=self._config.can_encode),
        )
        self._shell.enter(record)
        if not self._refuse_crowd(record):
            for place in items:
                if not self._claim(record, place):
                    break
        awaited = [
            mm_hash
            for mm_hash in transfers
            if mm_hash in record.claims and not record.claims[mm_hash].item.is_here
        ]
        trace("request.arrived", request=request_id, awaited=awaited)
        self._shell.advance()
        self._has_front |= params is not None
        if params is not None and params.sample:
            self._sampled[request_id] = {each.mm_hash for each in items}
        self._shell.requested += [
            transfers[mm_hash].transfer_id
            for mm_hash, claim in record.claims.items()
            if mm_hash in transfers
            and transfers[mm_hash].on_demand
            # Unless its space is reserved for the request, it may be evicted before its turn.
            and not (claim.item.is_here and claim.is_served)
        ]

    def encode_for_others(self, request_id: str, items: Sequence[PromptItem]) -> ItemRequest | None:
        """Claim space for items of an encode job.

        Returns:
            The claims, for `PrefillEncoderCache.leave`; ``None`` if requests use something
            else of such a name.
        """
        record = ItemRequest(request_id, next(self._numbers), items=items)
        self._cache.enter(record)
        for place in items:
            if self._cache.claim(record, place) is None:
                self._cache.leave(record)
                return None
        self._shell.advance()
        return record

    def part_arrived(self, request_id: str) -> None:
        """Fail a session of which a part with media has come (streaming input).

        vLLM adds each part to the request of the first, and items of parts that are to come cannot
        be claimed in their order.
        """
        record = self._records.get(request_id)
        if record is None:
            record = ItemRequest(request_id, next(self._numbers))
            self._cache.enter(record)
        if not record.failed:
            detail = (
                f"it sends media in parts (a streaming-input session), "
                f"which {self._config.instance} does not take: send the request as a whole"
            )
            self._refuse(record, "unavailable", detail)

    def may_schedule(
        self, request_id: str, num_computed_tokens: int, *, running: bool = True
    ) -> bool:
        """Return whether the next token of a request can be computed.

        False if that token belongs to an item that is not here and cannot be encoded here now, or
        if the request has not begun and must wait for its space (`may_start`), or for an item
        before which there are a few tokens only (`PlatformTraits.min_start_tokens`). Text before a
        missing item is not held up otherwise. A request that has lost an item for good is failed.

        Args:
            request_id: A request of this instance.
            num_computed_tokens: Tokens whose KV is there, prefix cache included. Of a request that
                is not running this is what *would* be there: nothing is given up for it yet.
            running: The engine has begun to compute the request, and not preempted it since.
        """
        record = self._records.get(request_id)
        if record is None:
            return True
        if record.failed:
            return False
        self._moved(record, num_computed_tokens, running=running)
        may = self._may_schedule(record)
        if not may and not running and not record.failed:
            self._sleepers.append(request_id)
        return may

    def take_sleepers(self) -> list[str]:
        """Return requests that could not begin in the step that was just scheduled.

        The engine need not query them again before `take_woken` returns them.
        """
        sleepers, self._sleepers = self._sleepers, []
        return [request_id for request_id in sleepers if request_id in self._records]

    def take_woken(self, *, is_busy: bool) -> list[str]:
        """Return requests that may begin now, if they slept; the oldest first.

        Args:
            is_busy: Requests compute in the step that comes, as far as the last one shows.
        """
        self._is_busy = is_busy
        woken = self._cache.take_woken()
        if self.held_back and not is_busy:
            woken = [*self.held_back.keys() | woken]
            self.held_back = {}
        return sorted(woken, key=lambda each: self._records[each].number)

    def encoded_here(self, request_id: str, mm_hash: str) -> None:
        """Note that the step that is being scheduled encodes an item."""
        if request_id in self._records:
            self._records[request_id].note_local(mm_hash)

    def finished(self, request_id: str, num_computed_tokens: int = 0) -> PrefillOutcome | None:
        """Remove a request that ended, and release the items that only it awaited.

        Args:
            num_computed_tokens: Tokens whose KV was there in the end, prefix cache included.

        Returns:
            Where each of its items came from; ``None`` for a request without items.
        """
        record = self._records.get(request_id)
        if record is None:
            return None
        if num_computed_tokens >= record.num_computed_tokens:
            self._moved(record, num_computed_tokens, running=True)
        for place in record.items:
            if place.end <= num_computed_tokens:
                record.note(ItemOutcome(mm_hash=place.mm_hash, source="encoder_cache"))
        self._cache.leave(record)
        self._shell.left(record)
        self._unavailable.discard(request_id)
        self.held_back.pop(request_id, None)
        self._sampled.pop(request_id, None)
        names = dict.fromkeys(place.mm_hash for place in record.items)
        items = tuple(record.outcomes[name] for name in names if name in record.outcomes)
        self._shell.metrics.request_ended(items, record.transfers)
        return PrefillOutcome(
            instance=self._config.instance,
            items=items,
            mm_inputs_done=record.mm_inputs_done,
            mm_inputs_total=len(record.items),
        )

    def find_stalled(self, *, computed: bool, starts: bool) -> str:
        """Return a request whose wait for items is to be ended, or an empty string.

        See `StallWatch.look`.
        """
        now = self._shell.clock()
        record = self._watch.look(now, computed=computed, starts=starts)
        if record is None:
            return ""
        self._shell.metrics.stalls.inc()
        state = describe(self._cache, self._shell.pool)
        logger.error("request %s: no progress of its items: %s", record.request_id, state)
        return record.request_id

    def end_stalled(self, request_id: str) -> None:
        """End the wait of a request: it encodes items of other requests' transfers, or fails."""
        record = self._records[request_id]
        reason = (
            f"no item has come to {self._config.instance} for {self._watch.limit_s:g} s "
            "(twice transfer.wait_timeout_s)"
        )
        if record.expired or not self._cache.expire(record, reason):
            names = ", ".join(record.claims)
            detail = f"{reason}, and it waits for {names}: send it again"
            self._refuse(record, "unavailable", detail)

    def take_forgotten(self, sleepers: Iterable[str]) -> list[str]:
        """Return requests that sleep though they can begin; there are none unless that is a fault.

        Looks every `transfer.wait_timeout_s` only. To be called when `take_woken` was.
        """
        now = self._shell.clock()
        if now < self._next_look_s:
            return []
        self._next_look_s = now + self._config.wait_timeout_s
        records = [self._records[each] for each in sleepers if each in self._records]
        found = [each.request_id for each in records if not each.failed and self._is_able(each)]
        for request_id in found:
            self._shell.metrics.stalls.inc()
            logger.error("request %s was not woken when it could begin", request_id)
        return found

    def take_news(self) -> CacheNews | None:
        """Return news for the front since the last call; ``None`` without news or a front.

        A requested transfer is reported at once: encoding begins only then.
        """
        entries, self._cache.changes = self._cache.changes, {}
        requested, self._shell.requested = self._shell.requested, []
        refused, self._refused = self._refused, {}
        samples, self._samples = self._samples, {}
        if not self._has_front or not (entries or requested or refused or samples):
            return None
        return CacheNews(
            entries=entries, requested=tuple(requested), refused=refused, samples=samples
        )

    @property
    def sampled(self) -> list[str]:
        """Items of whose encoder outputs workers are to report a sample."""
        return [mm_hash for items in self._sampled.values() for mm_hash in items]

    def note_samples(self, samples: Mapping[str, OutputSample]) -> None:
        """Take samples of encoder outputs in, which the front awaits."""
        self._samples.update(samples)
        for items in self._sampled.values():
            items.difference_update(samples)

    def take_unavailable(self) -> set[str]:
        """Return requests that cannot have their items, for the scheduler to fail."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    # --------------------------------------------------------------------------------------------

    def _claim(self, record: ItemRequest, place: PromptItem) -> bool:
        """Let a new request claim one of its items; fail it if that is impossible."""
        mm_hash, tensor = place.mm_hash, place.tensor
        transfer = record.transfers.get(mm_hash)
        cache, pool = self._cache, self._shell.pool
        if not cache.fits_at_all(place.num_embeds, tensor.nbytes if transfer else 0):
            detail = (
                f"an item of this request needs {place.num_embeds} encoder embeddings in "
                f"{tensor.nbytes} bytes; its engine receives at most {cache.cache_size} embeddings "
                f"and {pool.capacity_bytes} bytes: send a smaller image, or raise "
                "transfer.pool_bytes"
            )
            self._refuse(record, "too_large", detail)
            return False
        again = mm_hash in record.claims
        claim = cache.claim(record, place, transfer.transfer_id if transfer else "")
        if claim is None:
            detail = (
                f"item {mm_hash} of this request is {tensor}, but requests before it use an item "
                f"of that name that is {cache.items[mm_hash].tensor}: give different items "
                "different uuids"
            )
            self._refuse(record, "unavailable", detail)
            return False
        if transfer is not None and not again:
            self._shell.expect(claim)
        return True

    def _refuse_crowd(self, record: ItemRequest) -> bool:
        """Fail a request whose items a drafter needs at once, if the cache holds fewer."""
        for index, first in enumerate(record.items if self._lookahead else ()):
            sizes = {
                each.mm_hash: each.num_embeds
                for each in record.items[index:]
                if each.begin < first.end + 2 * self._lookahead
            }
            if sum(sizes.values()) > self._cache.cache_size:
                detail = (
                    f"{len(sizes)} items of this request are {sum(sizes.values())} encoder "
                    f"embeddings, which speculative decoding needs at once (it reads "
                    f"{self._lookahead} tokens ahead); its engine holds "
                    f"{self._cache.cache_size}: send smaller images, or raise "
                    "engine_args.max_num_batched_tokens"
                )
                self._refuse(record, "too_large", detail)
                return True
        return False

    def _may_schedule(self, record: ItemRequest) -> bool:
        first = record.next_item
        if first == len(record.items):
            if record.running:
                self._cache.incomplete.discard(record.request_id)
            return True
        if not record.running and not room.may_start(self._cache, record):
            return False
        if record.items[first].mm_hash in record.lost:  # Text before it would be wasted.
            self._fail_lost(record, record.items[first].mm_hash)
            return False
        missing = self._missing(record)
        if missing in record.lost:
            self._fail_lost(record, missing)
        if missing:
            return False
        if is_held_back := self._is_held_back(record):
            self.held_back[record.request_id] = None
        return not is_held_back

    def _is_held_back(self, record: ItemRequest) -> bool:
        """Return whether a start would compute a few tokens of text only, while others compute.

        It would release no space (`room`): an item is computed only if it is here.
        """
        first = record.next_item
        if record.running or not self._is_busy or first == len(record.items):
            return False
        place = record.items[first]
        if place.begin - record.num_computed_tokens >= self._min_start_tokens:
            return False
        return place.mm_hash not in record.lost and not self._is_ready(record, place)

    def _missing(self, record: ItemRequest) -> str:
        """Return the first item that the next tokens of a request need, and that is not here.

        Nor can it be encoded in the step that computes them; an empty string if there is none.
        """
        computed = record.num_computed_tokens
        for place in itertools.islice(record.items, record.next_item, None):
            if computed + self._lookahead < place.begin:
                break
            if place.end <= computed:
                continue
            if place.mm_hash in record.lost or not self._is_ready(record, place):
                return place.mm_hash
        return ""

    def _is_ready(self, record: ItemRequest, place: PromptItem) -> bool:
        """Return whether a request may compute an item in a step, or encode it there."""
        claim = record.claims[place.mm_hash]
        return claim.is_served and (claim.item.is_here or claim.item.state is State.LOCAL)

    def _is_able(self, record: ItemRequest) -> bool:
        """Return whether a request could compute, or would be failed, if the engine ran it now."""
        may_start = record.running or room.may_start(self._cache, record)
        missing = self._missing(record)
        return may_start and (missing in record.lost or not (missing or self._is_held_back(record)))

    def _refuse(self, record: ItemRequest, code: RequestFailure, detail: str) -> None:
        """Let the scheduler end a request, which has not failed yet.

        Args:
            code: For the count.
            detail: For the log: value, limit and remedy.
        """
        logger.error("request %s: %s", record.request_id, detail)
        self._shell.metrics.requests_failed.labels(code).inc()
        self._unavailable.add(record.request_id)
        if code == "too_large":
            self._refused[record.request_id] = detail
        self._cache.fail(record)
        self._shell.decline(record)

    def _fail_lost(self, record: ItemRequest, mm_hash: str) -> None:
        detail = (
            f"item {mm_hash}: {record.lost[mm_hash]}; it cannot be encoded here, where the request "
            "holds no media or the instance no encoder: send the request again"
        )
        self._refuse(record, "unavailable", detail)

    def _moved(self, record: ItemRequest, num_computed_tokens: int, *, running: bool) -> None:
        """See `PrefillEncoderCache.moved`; remembers what the prefix cache covered."""
        for claim in self._cache.moved(record, num_computed_tokens, running=running):
            record.note(ItemOutcome(mm_hash=claim.item.mm_hash, source="prefix_cache"))
        if not running:
            return
        if record.next_item > record.mm_inputs_done:
            record.mm_inputs_done = record.next_item
            trace(
                "request.progress",
                request=record.request_id,
                mm_inputs_done=record.mm_inputs_done,
                mm_inputs_total=len(record.items),
            )
            for place in record.items:
                if place.mm_hash in record.lost and place.end <= num_computed_tokens:
                    record.note(ItemOutcome(mm_hash=place.mm_hash, source="prefix_cache"))
