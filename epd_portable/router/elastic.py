"""Which items of a request are encoded where they are needed, because that ends sooner.

Encode instances may have a queue while the prefill+decode instance that waits for them has nothing
to do. Then that one encodes, too: with as many instances, none is idle while items wait. But while
it encodes it computes no token for anybody, so it does so for others' sake only when the queue is
much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from epd_portable.router.instances import Instance
from epd_portable.router.media import MediaItem

Reason = Literal["idle", "queue"]
"""Why an item is encoded by the PD instance by choice.

``idle``: it computes for nobody, and encoders would need `IDLE_THRESHOLD` times as long. ``queue``:
it does compute, but they would need ``router.elastic_threshold`` times as long.
"""

IDLE_THRESHOLD = 2.0
"""A text that comes while an idle instance encodes waits for that: it must be worth something."""

_NEW = 0.2
"""Weight of the latest time in the average."""


class EncodeTimes:
    """How long encoders take for an item, on average of late, by modality and size.

    Sizes are powers of two of the number of pixels, so a model that scales large pictures down is
    followed.
    """

    def __init__(self) -> None:
        self._averages: dict[tuple[str, int], float] = {}

    def observe(self, item: MediaItem, seconds: float) -> None:
        """Take a time in."""
        kind = _kind(item)
        average = self._averages.get(kind, seconds)
        self._averages[kind] = average + _NEW * (seconds - average)

    def of(self, item: MediaItem) -> float:
        """Return the seconds for an item; 0 where none of the kind was seen."""
        return self._averages.get(_kind(item), 0.0)


def sooner_here(
    items: Sequence[MediaItem],
    encoders: Sequence[Instance],
    pd: Instance,
    times: EncodeTimes,
    *,
    threshold: float,
) -> tuple[int, Reason]:
    """Return how many of a request's first items the PD instance should encode, and why.

    The first, because it computes a prompt from its beginning: while it encodes these, encoders
    bring the rest. One more is encoded here as long as that ends before encoders would have ended
    with what is left.

    Args:
        items: Of the request, in the order of the prompt.
        encoders: Who would encode each.
        pd: Who would encode them else; it takes as long for it.
        times: Of encoding.
        threshold: So many times longer must it take encoders if the PD instance computes for other
            requests meanwhile.
    """
    reason: Reason = "queue" if pd.computes_for else "idle"
    factor = threshold if pd.computes_for else min(threshold, IDLE_THRESHOLD)
    end_s = {encoder: encoder.owed_s for encoder in encoders}
    for item, encoder in zip(items, encoders, strict=True):
        end_s[encoder] += times.of(item)
    here_s = pd.owed_s
    for count, (item, encoder) in enumerate(zip(items, encoders, strict=True)):
        time_s = times.of(item)
        here_s += time_s
        if not time_s or factor * here_s >= max(end_s.values()):
            return count, reason
        end_s[encoder] -= time_s
        if encoder not in encoders[count + 1 :]:
            del end_s[encoder]
    return len(items), reason


def _kind(item: MediaItem) -> tuple[str, int]:
    return item.modality, item.pixels.bit_length()
