"""Encoder of each item of a request, by default and after failures. No I/O.

Encode instances may have a queue while the prefill+decode instance that waits for their items is
idle. With *elastic encoding* that instance encodes some of them itself, where that ends sooner:
with as many instances, none is idle while items wait. Meanwhile it computes no token, or fewer
(`epd_portable.encode.background`), so a busy instance does so only for a much longer queue.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

from epd_portable.config.front import MAX_ENCODERS
from epd_portable.config.instance import EncodePriority
from epd_portable.media.limits import RequestItem
from epd_portable.placement.estimates import EncodeTimes
from epd_portable.placement.instances import Instance

ItemT = TypeVar("ItemT", bound=RequestItem)
ChooseEncoder: TypeAlias = Callable[[ItemT, Collection[str]], Instance | None]
"""Returns the usable encode instance that should have an item; none of those names."""

By = Literal["encoder", "stored", "local_first", "local", "held"]
"""Origin of an item.

``local_first``: the prefill+decode instance encodes it by choice; ``local``: because no encoder is
usable. ``held``: it has the item. ``stored``: the store has it.
"""
Busy = Literal["idle", "queue"]
"""``queue``: the prefill+decode instance computes for others, whose tokens wait meanwhile."""
THRESHOLDS: Mapping[EncodePriority, Mapping[Busy, float]] = {
    "tokens": {"idle": 4.0},
    "balanced": {"idle": 2.0, "queue": 4.0},
    "images": {"idle": 1.0, "queue": 2.0},
}
"""Encoders must take so many times longer than the prefill+decode instance; none: never.

A text that comes while an idle instance encodes waits for that: it must be worth something.
"""

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""
JOB_GRACE_S = 2.0
"""Replies to encode jobs are accepted for this long when nothing waits for them any more."""
MAX_PREFILLS = 2
"""Prefill instances tried for a request, before the decode instance prefills itself."""
RETRIES_AT_ONCE = 100
REQUESTS_PER_RETRY = 5
"""Requests and jobs may be sent again that often: some at once, and then a part of what comes, so
that a failing topology does not get twice the work."""


class RetryBudget:
    """Most retries of an item or request."""

    def __init__(self) -> None:
        self._requests = RETRIES_AT_ONCE * REQUESTS_PER_RETRY

    def count_request(self) -> None:
        """Count a request: for several of them, something may be sent again."""
        self._requests = min(self._requests + 1, RETRIES_AT_ONCE * REQUESTS_PER_RETRY)

    def spend(self) -> bool:
        """Return whether one more may be sent again, and count it."""
        if self._requests < REQUESTS_PER_RETRY:
            return False
        self._requests -= REQUESTS_PER_RETRY
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment(Generic[ItemT]):
    """Origin of one item.

    Attributes:
        encoder: First encoder, with ``encoder``.
        is_elastic: Elastic encoding chose it.
    """

    item: ItemT
    by: By
    encoder: Instance | None = None
    is_elastic: bool = False


def assign_items(
    items: Sequence[ItemT],
    here: Instance,
    choose: ChooseEncoder[ItemT],
    times: EncodeTimes,
    *,
    settled: Mapping[str, By],
    threshold: float | None = None,
) -> list[Assignment[ItemT]]:
    """Return the origin of each of some distinct items, in their order.

    Args:
        here: Prefill+decode instance that needs them.
        settled: Origins without a choice, by ``item_uuid``.
        threshold: Encoders must take so many times longer for ``here`` to encode by choice, see
            `THRESHOLDS`; ``None`` for never.
    """
    encoders = _choose_encoders([e for e in items if e.item_uuid not in settled], choose, times)
    first: Collection[str] = ()
    chosen = [encoder for encoder in encoders.values() if encoder is not None]
    if threshold is not None and len(chosen) == len(encoders):
        open_items = [item for item in items if item.item_uuid in encoders]
        here_s = [times.of(item) for item in open_items]
        there_s = [times.of(item, each.name) for item, each in zip(open_items, chosen, strict=True)]
        count = count_local_first(here_s, there_s, chosen, here, threshold)
        first = [*encoders][:count]
    found = []
    for item in items:
        encoder = encoders.get(item.item_uuid)
        if by := settled.get(item.item_uuid):
            found.append(Assignment(item=item, by=by))
        elif item.item_uuid in first:
            found.append(Assignment(item=item, by="local_first", is_elastic=True))
        elif encoder is here:
            found.append(Assignment(item=item, by="local_first"))
        elif encoder is not None:
            found.append(Assignment(item=item, by="encoder", encoder=encoder))
        else:
            found.append(Assignment(item=item, by="local"))
    return found


def or_own(own: Instance, choose: ChooseEncoder[ItemT]) -> ChooseEncoder[ItemT]:
    """Return a choice for a prefill+decode instance that encodes: another only if less busy.

    What it encodes itself is not transferred.
    """

    def chosen(item: ItemT, exclude: Collection[str]) -> Instance | None:
        other = choose(item, [*exclude, own.name])
        if other is None or own.load / own.weight <= other.load / other.weight:
            return own
        return other

    return chosen


def _choose_encoders(
    items: Sequence[ItemT], choose: ChooseEncoder[ItemT], times: EncodeTimes
) -> dict[str, Instance | None]:
    """Return the encoder of each of some items, by ``item_uuid``."""
    found = {}
    with contextlib.ExitStack() as reserved:
        for item in items:
            found[item.item_uuid] = encoder = choose(item, ())
            if encoder is not None:
                # Not in flight yet, but the next item's choice must see it.
                reserved.enter_context(encoder.in_flight(item.item_uuid))
                reserved.enter_context(encoder.encoding(times.of(item, encoder.name)))
    return found


def count_local_first(
    here_s: Sequence[float],
    there_s: Sequence[float],
    encoders: Sequence[Instance],
    here: Instance,
    threshold: float,
) -> int:
    """Return how many of a request's first items the prefill+decode instance should encode.

    The first, because it computes a prompt from its beginning: while it encodes these, encoders
    bring the rest. One more is encoded here as long as that ends before encoders would have ended
    with what is left.

    Args:
        here_s: Seconds that each item takes at ``here``, in the order of the prompt. At the first
            0, for an unknown time, the count ends.
        there_s: Seconds that each takes at its encoder.
        encoders: Encoder of each item otherwise.
        here: The prefill+decode instance.
        threshold: See `THRESHOLDS`.
    """
    end_s = {encoder: encoder.pending_encode_s for encoder in encoders}
    for job_s, encoder in zip(there_s, encoders, strict=True):
        end_s[encoder] += job_s
    end_here_s = here.pending_encode_s
    jobs = zip(here_s, there_s, encoders, strict=True)
    for count, (item_s, job_s, encoder) in enumerate(jobs):
        end_here_s += item_s
        if not item_s or threshold * end_here_s >= max(end_s.values()):
            return count
        end_s[encoder] -= job_s
        if encoder not in encoders[count + 1 :]:
            del end_s[encoder]
    return len(here_s)


class FailureKind(enum.StrEnum):
    """Cause of a failed encode job."""

    FULL = "full"
    """The engine has as many jobs as it takes."""
    TIMEOUT = "timeout"
    """The job has not ended within its time."""
    LOST = "lost"
    """The engine's process or the connection to it has ended."""
    ERROR = "error"
    """The engine has ended the job without the item."""
    GAVE_UP = "gave_up"
    """The engine has encoded the item, and could not deliver it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeFailure:
    """Failure of an encode job.

    Attributes:
        reason: For the log.
        full_for_s: With `FailureKind.FULL`: seconds until the encoder takes jobs again, about.
    """

    kind: FailureKind
    reason: str
    full_for_s: float = 0.0


@dataclass(eq=False, slots=True)
class EncodeTries:
    """Next encoder for one item; times come in as arguments, of one clock.

    An encoder that was full may be next again, and so may one that gave the item up, once. One that
    failed may not, and after `MAX_ENCODERS` failures none is.

    Attributes:
        choose: Returns the encoder that should have the item; none of those names.
        retries: Of all items and requests.
        deadline_s: Time after which no encoder is next.
        failure: The last one.
    """

    choose: Callable[[Collection[str]], Instance | None]
    retries: RetryBudget
    deadline_s: float
    failure: EncodeFailure | None = None
    _failed: list[str] = field(default_factory=list)
    _full: dict[str, float] = field(default_factory=dict)
    _gave_up: set[str] = field(default_factory=set)
    _last_full: EncodeFailure | None = None
    _next: Instance | None = None
    _all_full: bool = False

    def note_failure(self, encoder: str, failure: EncodeFailure, now_s: float) -> float:
        """Take in a failure; return the seconds to wait before `next_encoder`.

        They are 0 unless every encoder that is left is full.
        """
        late = now_s >= self.deadline_s
        if failure.kind is FailureKind.TIMEOUT and self._last_full and late:
            # Cut off by the item's deadline, not by the encoder, which had been full so far.
            failure = self._last_full
        self.failure = failure
        if failure.kind is FailureKind.FULL:
            self._last_full = failure
            self._full[encoder] = now_s + failure.full_for_s
        elif failure.kind is FailureKind.GAVE_UP and encoder not in self._gave_up:
            self._gave_up.add(encoder)
            self._full[encoder] = now_s
        else:
            self._failed.append(encoder)
        self._next, self._all_full = None, False
        if late or len(self._failed) >= MAX_ENCODERS:
            return 0.0
        self._next = self.choose([*self._failed, *self._full])
        first_s = min(self._full.values(), default=self.deadline_s)
        self._all_full = self._next is None and first_s < self.deadline_s
        return max(first_s - now_s, 0.0) if self._all_full else 0.0

    def next_encoder(self) -> Instance | None:
        """Return the next encoder; ``None`` for the prefill+decode instance itself."""
        if self._all_full:
            self._full.clear()
            self._next = self.choose(self._failed)
        assert self.failure is not None, "nothing has failed"
        costs = self.failure.kind is not FailureKind.FULL
        if self._next is not None and costs and not self.retries.spend():
            return None
        return self._next

    def describe(self) -> str:
        """Return the encoders that failed, and the last reason."""
        assert self.failure is not None, "nothing has failed"
        found = (("tried", self._failed), ("full", sorted(self._full)))
        parts = [f"encoders {word}: {', '.join(names)}" for word, names in found if names]
        return "; ".join([*parts, f"last: {self.failure.reason}"])
