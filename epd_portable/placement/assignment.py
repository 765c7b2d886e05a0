"""Who brings each item of a request, what both ends are told, and who is asked next. No I/O.

Encode instances may have a queue while the prefill+decode instance that waits for their items has
nothing to do. With *elastic encoding* that one encodes some of them by itself, where that ends
sooner: with as many instances, none is idle while items wait. But while it encodes it computes no
token for anybody, or fewer (`epd_portable.items.background`), so it does so for others' sake only
when the queue is much longer.
"""

from __future__ import annotations

import contextlib
import enum
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from epd_portable.config.front import MAX_ENCODERS
from epd_portable.config.secret import Secret
from epd_portable.media.limits import RequestItem
from epd_portable.placement.fallbacks import RetryBudget
from epd_portable.placement.instances import Instance
from epd_portable.placement.work import nearest_size
from epd_portable.transfer.stores.lookup import StoredItem
from epd_portable.wire.params import EncodeTransfer, ExpectedTransfer

ChooseEncoder: TypeAlias = Callable[[Collection[str]], Instance | None]
"""Returns the usable encode instance that should have an item; not one of those names."""
ItemT = TypeVar("ItemT", bound=RequestItem)

Reason = Literal["idle", "queue", "parked"]
"""Why an item is encoded by the PD instance by choice.

``idle``: it computes nothing, and encoders would need `IDLE_THRESHOLD` times as long. ``queue``:
it does compute, but they would need `BUSY_THRESHOLD` times as long.
``parked``: encoders are, and answers come from their devices meanwhile.
"""

IDLE_THRESHOLD = 2.0
"""A text that comes while an idle instance encodes waits for that: it must be worth something."""
BUSY_THRESHOLD = 4.0
"""The same while it computes for others, whose tokens wait meanwhile."""

_NEW = 0.2
"""Weight of the latest time in the average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment(Generic[ItemT]):
    """Who brings one item.

    Attributes:
        by: ``local_first``: the PD instance encodes it by choice. ``local``: it does because no
            encoder is usable. ``held``: it has the item.
        encoder: Who is asked first, with ``encoder``; the PD instance where it is one.
        stored: Its entry, with ``stored``.
        elastic: Why elastic encoding chose the PD instance, if that did.
    """

    item: ItemT
    by: Literal["encoder", "stored", "local_first", "local", "held"]
    encoder: Instance | None = None
    stored: StoredItem | None = None
    elastic: Reason | None = None


def assign_items(
    items: Sequence[ItemT],
    pd: Computing,
    choose: Callable[[ItemT, Collection[str]], Instance | None],
    times: EncodeTimes,
    *,
    stored: Mapping[str, StoredItem] | None = None,
    left_here: Collection[str] = (),
    held: Collection[str] = (),
    elastic_threshold: float | None = None,
    any_encoders: bool = True,
    own: Instance | None = None,
) -> list[Assignment[ItemT]]:
    """Return who brings each of some items to a PD instance, in their order.

    Args:
        items: Distinct.
        choose: As `ChooseEncoder`, of an item.
        stored: What the store has, by ``item_uuid``.
        left_here: ``item_uuid`` of those that the PD instance shall encode.
        held: ``item_uuid`` of others, that it has in its encoder cache.
        elastic_threshold: See `count_local_first`; ``None`` for no elastic encoding.
        any_encoders: Whether there are encode instances, usable or not.
        own: The PD instance, where that is an encoder as others are; see `or_own`.
    """
    stored = stored or {}
    asked = [item for item in items if item.item_uuid not in {*stored, *left_here, *held}]
    encoders = choose_encoders(asked, choose, times)
    chosen = [encoder for encoder in encoders.values() if encoder is not None]
    here: Collection[str] = ()
    reason: Reason | None = None
    if elastic_threshold is not None and len(chosen) == len(asked):
        times_s = [times.of(item) for item in asked]
        if any(encoder.parked for encoder in chosen):
            # Those whose time is not known yet are encoded there, and known then.
            here, reason = [n for n, t in zip(encoders, times_s, strict=True) if t], "parked"
        else:
            count, reason = count_local_first(times_s, chosen, pd, threshold=elastic_threshold)
            here = [*encoders][:count]
    found = []
    for item in items:
        name = item.item_uuid
        encoder = encoders.get(name)
        if entry := stored.get(name):
            found.append(Assignment(item=item, by="stored", stored=entry))
        elif name in held and name not in left_here:
            found.append(Assignment(item=item, by="held"))
        elif encoder is not None and encoder is own:
            found.append(Assignment(item=item, by="local_first", encoder=own))
        elif name in here:
            found.append(Assignment(item=item, by="local_first", elastic=reason))
        elif encoder is not None:
            found.append(Assignment(item=item, by="encoder", encoder=encoder))
        elif name in left_here or not any_encoders:
            found.append(Assignment(item=item, by="local_first"))
        else:
            found.append(Assignment(item=item, by="local"))
    return found


def or_own(
    own: Instance, choose: Callable[[ItemT, Collection[str]], Instance | None]
) -> Callable[[ItemT, Collection[str]], Instance | None]:
    """Return a choice of encoders for a PD instance that is one: another only if less busy.

    What it encodes itself is not transferred.
    """

    def chosen(item: ItemT, exclude: Collection[str]) -> Instance | None:
        other = choose(item, [*exclude, own.name])
        if other is None or own.load / own.weight <= other.load / other.weight:
            return own
        return other

    return chosen


def choose_encoders(
    items: Sequence[ItemT],
    choose: Callable[[ItemT, Collection[str]], Instance | None],
    times: EncodeTimes,
) -> dict[str, Instance | None]:
    """Return who should have each of some items, by ``item_uuid``."""
    found = {}
    with contextlib.ExitStack() as reserved:
        for item in items:
            found[item.item_uuid] = encoder = choose(item, ())
            if encoder is not None:
                # Not in flight yet, but the next item's choice must see it.
                reserved.enter_context(encoder.working(item.item_uuid))
                reserved.enter_context(encoder.encoding(times.of(item)))
    return found


def new_transfer(item: RequestItem, consumer: str, secret: Secret) -> EncodeTransfer:
    """Return a way of its own for an item, whichever instance encodes it, with its proof.

    Args:
        consumer: Control address of the PD instance.
    """
    transfer_id = uuid.uuid4().hex
    return EncodeTransfer(
        transfer_id=transfer_id,
        item_uuid=item.item_uuid,
        consumer=consumer,
        modality=item.modality,
        proof=secret.sign_transfer(transfer_id, item.item_uuid, consumer),
    )


def expected_transfer(transfer: EncodeTransfer) -> ExpectedTransfer:
    """Return what the PD instance may expect, with the item's media."""
    return ExpectedTransfer(
        transfer_id=transfer.transfer_id,
        item_uuid=transfer.item_uuid,
        modality=transfer.modality,
    )


class FailureKind(enum.StrEnum):
    """Why an encode job has failed."""

    FULL = "full"
    """The engine's queue, or all slots, are taken."""
    TIMEOUT = "timeout"
    """It has not ended within its time."""
    LOST = "lost"
    """The engine's process has ended, or the connection to it."""
    ERROR = "error"
    """The engine has ended it without the item."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeFailure:
    """Why an item was not encoded.

    Attributes:
        reason: For the log.
        full_for_s: With `FailureKind.FULL`: the encoder has room again after about this long.
    """

    kind: FailureKind
    reason: str
    full_for_s: float = 0.0


class EncodeTries:
    """Which encoder is asked for one item next; times come in as arguments, of one clock.

    An encoder that is full may be asked again; one that failed may not, and `MAX_ENCODERS` of them
    are the end.

    Args:
        choose: Returns who should have the item.
        deadline_s: No encoder is asked afterwards.
    """

    def __init__(self, choose: ChooseEncoder, retries: RetryBudget, *, deadline_s: float) -> None:
        self.failure: EncodeFailure | None = None
        self._choose = choose
        self._retries = retries
        self._deadline_s = deadline_s
        self._failed: list[str] = []
        self._full: dict[str, float] = {}
        self._last_full: EncodeFailure | None = None
        self._next: Instance | None = None
        self._all_full = False

    def note_failure(self, encoder: str, failure: EncodeFailure, now_s: float) -> float:
        """Take in how a try has ended.

        Returns:
            How long to wait before `next_encoder`: 0 unless every encoder that is left is full.
        """
        late = now_s >= self._deadline_s
        if failure.kind is FailureKind.TIMEOUT and self._last_full and late:
            # Cut off by the item's deadline, not by the encoder, which had been full so far.
            failure = self._last_full
        self.failure = failure
        if failure.kind is FailureKind.FULL:
            self._last_full = failure
            self._full[encoder] = now_s + failure.full_for_s
        else:
            self._failed.append(encoder)
        self._next, self._all_full = None, False
        if late or len(self._failed) >= MAX_ENCODERS:
            return 0.0
        self._next = self._choose([*self._failed, *self._full])
        first_s = min(self._full.values(), default=self._deadline_s)
        self._all_full = self._next is None and first_s < self._deadline_s
        return max(first_s - now_s, 0.0) if self._all_full else 0.0

    def next_encoder(self) -> Instance | None:
        """Return who is asked next; ``None`` if the PD instance is to encode the item."""
        if self._all_full:
            self._full.clear()
            self._next = self._choose(self._failed)
        assert self.failure is not None, "nothing has failed"
        costs = self.failure.kind is not FailureKind.FULL
        if self._next is not None and costs and not self._retries.spend():
            return None
        return self._next

    def describe(self) -> str:
        """Return whom it failed at, and why the last time."""
        assert self.failure is not None, "nothing has failed"
        found = (("tried", self._failed), ("full", sorted(self._full)))
        parts = [f"encoders {word}: {', '.join(names)}" for word, names in found if names]
        return "; ".join([*parts, f"last: {self.failure.reason}"])


# Elastic encoding.


class EncodeTimes:
    """How long encoders take for an item, on average of late, by modality and size.

    Sizes are powers of two of the estimated number of pixels, so a model that scales large pictures
    down is followed. A size that was not seen is taken for the next smaller or larger one: equal
    pictures differ that much in the bytes from which pixels are estimated.
    """

    def __init__(self) -> None:
        self._averages: dict[tuple[str, int], float] = {}

    def observe(self, item: RequestItem, seconds: float) -> None:
        """Take a time in."""
        kind = _kind(item)
        average = self._averages.get(kind, seconds)
        self._averages[kind] = average + _NEW * (seconds - average)

    def of(self, item: RequestItem) -> float:
        """Return the seconds for an item; 0 where none of about its size was seen."""
        return nearest_size(self._averages, *_kind(item)) or 0.0


class Encoding(Protocol):
    """Who encodes."""

    @property
    def pending_encode_s(self) -> float:
        """Seconds of work that it was given and has not done."""


class Computing(Encoding, Protocol):
    """Who encodes, and computes tokens."""

    @property
    def computes_for(self) -> int:
        """Requests whose tokens wait while it encodes; all but 0 are alike."""


def count_local_first(
    times_s: Sequence[float],
    encoders: Sequence[Encoding],
    here: Computing,
    *,
    threshold: float,
) -> tuple[int, Reason]:
    """Return how many of a request's first items the PD instance should encode, and why.

    The first, because it computes a prompt from its beginning: while it encodes these, encoders
    bring the rest. One more is encoded here as long as that ends before encoders would have ended
    with what is left.

    Args:
        times_s: Seconds of encoding for each item, in the order of the prompt; 0 where they are not
            known, and no such item is encoded here, nor any behind it.
        encoders: Who would encode each.
        here: The PD instance, who would encode them else; it takes as long for it.
        threshold: So many times longer must it take encoders if the PD instance computes for other
            requests meanwhile.
    """
    reason: Reason = "queue" if here.computes_for else "idle"
    factor = threshold if here.computes_for else min(threshold, IDLE_THRESHOLD)
    end_s = {encoder: encoder.pending_encode_s for encoder in encoders}
    for time_s, encoder in zip(times_s, encoders, strict=True):
        end_s[encoder] += time_s
    here_s = here.pending_encode_s
    for count, (time_s, encoder) in enumerate(zip(times_s, encoders, strict=True)):
        here_s += time_s
        if not time_s or factor * here_s >= max(end_s.values()):
            return count, reason
        end_s[encoder] -= time_s
        if encoder not in encoders[count + 1 :]:
            del end_s[encoder]
    return len(times_s), reason


def _kind(item: RequestItem) -> tuple[str, int]:
    return item.modality, item.pixels.bit_length()
