"""Which items of a request are encoded where they are needed, because that ends sooner.

Encode instances may have a queue while the prefill+decode instance that waits for them has nothing
to do. Then that one encodes, too: with as many instances, none is idle while items wait. But while
it encodes it computes no token for anybody, or fewer (`epd_portable.runners.background`), so it
does so for others' sake only when the queue is much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from epd_portable.media.limits import RequestItem

Reason = Literal["idle", "queue"]
"""Why an item is encoded by the PD instance by choice.

``idle``: it computes for nobody, and encoders would need `IDLE_THRESHOLD` times as long. ``queue``:
it does compute, but they would need `BUSY_THRESHOLD` times as long.
"""

IDLE_THRESHOLD = 2.0
"""A text that comes while an idle instance encodes waits for that: it must be worth something."""
BUSY_THRESHOLD = 4.0
"""The same while it computes for others, whose tokens wait meanwhile."""

_NEW = 0.2
"""Weight of the latest time in the average."""


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
        modality, size = _kind(item)
        for near in (size, size - 1, size + 1):
            if (average := self._averages.get((modality, near))) is not None:
                return average
        return 0.0


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
