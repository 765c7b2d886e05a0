"""Where items came from, so that a run in which something fell back is not taken for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from epd_portable.bench.traces import Event, named


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the items of a run came from.

    Attributes:
        asked: Distinct pictures that were sent to the topology.
        by_path: Items that were transferred, by path.
        local: Items that a prefill+decode instance encoded itself.
        failed: Transfers that failed, whatever became of the item.
        encoded: Items that went through an encoder, by instance.
    """

    asked: int
    by_path: dict[str, int]
    local: int
    failed: int
    encoded: dict[str, int]


def provenance(events: Iterable[Event], *, asked: int) -> Provenance:
    """Count where items came from.

    Args:
        events: Of all instances of the topology.
        asked: Distinct pictures that it was sent in that time.
    """
    found = list(events)
    encoded: Counter[str] = Counter()
    for event in named(found, "encode.begin"):
        items = event["items"]
        assert isinstance(items, list)
        encoded[str(event["instance"])] += len(items)
    return Provenance(
        asked=asked,
        by_path=dict(Counter(str(event["path"]) for event in named(found, "item.landed"))),
        local=len(named(found, "item.local")),
        failed=len(named(found, "item.failed")),
        encoded=dict(encoded),
    )
