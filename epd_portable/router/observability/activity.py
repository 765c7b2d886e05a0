"""What has gone between instances, and which fallbacks were used."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

from epd_portable.router.observability.record import ItemRecord, Listener, RequestRecord, Step
from epd_portable.wire.params import ItemOutcome

MAX_PAIRS = 4096
"""Beyond them the one is forgotten that was used longest ago."""

Cargo = Literal["items", "kv"]


class Traffic(msgspec.Struct, kw_only=True):
    """What went from one instance to another since the router started.

    Attributes:
        source: Instance that encoded, or prefilled.
        target: Instance that used that.
        cargo: What it was.
        path: Transfer path of the last item of which that is known; empty for none.
        count: Items that were encoded for it, or prompts.
        reported: Items of which an answer said how many bytes came.
        nbytes: Bytes of those.
    """

    source: str
    target: str
    cargo: Cargo
    path: str = ""
    count: int = 0
    reported: int = 0
    nbytes: int = 0


class FallbackUse(msgspec.Struct, kw_only=True):
    """How often a fallback was used since the router started, and when last (monotonic)."""

    fallback: str
    count: int = 0
    at: float = 0.0


class Activity(Listener):
    """Counts what the status page shows in addition to requests.

    Attributes:
        fallbacks: By name, see `epd_portable.wire.outcomes.Fallback`.
    """

    def __init__(self) -> None:
        self.fallbacks: dict[str, FallbackUse] = {}
        self._pairs: dict[tuple[str, str, Cargo], Traffic] = {}

    @property
    def pairs(self) -> tuple[Traffic, ...]:
        """Pairs of instances between which something went, the one used last at the end."""
        return tuple(self._pairs.values())

    def item_ended(self, record: RequestRecord, item: ItemRecord) -> None:
        """Count an item that was encoded for another instance; see `Listener`."""
        if item.end in ("encoded", "retried"):
            job = item.jobs[-1]
            # That in which the job began: the next one may have begun meanwhile.
            leg = next(leg for leg in reversed(record.legs) if leg.began_at <= job.began_at)
            self.delivered(job.instance, leg.instance)

    def stepped(self, record: RequestRecord, step: Step) -> None:
        """Count a fallback; see `Listener`."""
        use = self.fallbacks.setdefault(step.fallback, FallbackUse(fallback=step.fallback))
        use.count += 1
        use.at = step.at

    def ended(self, record: RequestRecord) -> None:
        """Count prompts that were computed for another instance; see `Listener`."""
        for leg, after in itertools.pairwise(record.legs):
            if (leg.stage, leg.failed, after.stage) == ("prefill", False, "answer"):
                self.prefilled(leg.instance, after.instance)

    def delivered(self, encoder: str, target: str) -> None:
        """Count an item that was encoded for an instance which has begun its answer."""
        self._pair(encoder, target, "items").count += 1

    def prefilled(self, source: str, target: str) -> None:
        """Count a prompt that an instance has computed for another one."""
        self._pair(source, target, "kv").count += 1

    def had(self, target: str, item: ItemOutcome) -> None:
        """Note how an instance says that it had an item."""
        if item.source == "transfer":
            pair = self._pair(item.encoder, target, "items")
            pair.path = item.path
            pair.reported += 1
            pair.nbytes += item.nbytes

    def forget(self, instance: str) -> None:
        """Drop what went from and to an instance that has left."""
        self._pairs = {key: pair for key, pair in self._pairs.items() if instance not in key[:2]}

    def _pair(self, source: str, target: str, cargo: Cargo) -> Traffic:
        key = (source, target, cargo)
        # The one used last goes to the end.
        pair = self._pairs.pop(key, None) or Traffic(source=source, target=target, cargo=cargo)
        self._pairs[key] = pair
        if len(self._pairs) > MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        return pair
