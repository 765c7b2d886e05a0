"""Records of requests while they are served, and the listeners to what becomes of them.

Noting costs a few writes a request, and nothing a token. Times are those of ``time.monotonic``, 0
for what has not happened. No content of a request is here, nor anything that leads to it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from epd_portable.config.roles import Duty
from epd_portable.media.limits import Modality
from epd_portable.placement.fallbacks import RequestPhase, next_fallback
from epd_portable.router.contents.media import MediaItem
from epd_portable.wire.outcomes import FailureKind, Fallback, ItemResult

Topology = Literal["text", "epd", "e+pd", "ep+d", "e+p+d", "p+d"]
"""Which instances had a part in a request, ``+`` between them.

``text``: one instance all of it, without items. ``epd``: the same with items. ``e+pd``: encode
instances at least one of the items. ``p+d``, ``ep+d``, ``e+p+d``: another instance the prompt.
"""
_ENDS_OF_CHAT = 2
"""Events of a chat's stream that carry no token: the first, which says the role, and the last."""


@dataclass(slots=True, eq=False)
class Leg:
    """One try at an instance: to answer or prefill, for the ``with`` statement, or an encode job.

    Attributes:
        ended_at: When it had answered, failed, or was given up.
        end: Empty before; ``done`` or ``failed``; of an encode job ``encoded``, ``cancelled`` or
            the value of a `FailureKind`.
        traceparent: Sent along, where requests are traced.
    """

    stage: Duty
    instance: str
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    end: str = ""
    traceparent: str = ""

    def __enter__(self) -> Leg:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish("done" if kind is None else "failed")

    def finish(self, end: str) -> None:
        """Note how it ended."""
        self.ended_at = time.monotonic()
        self.end = end

    @property
    def failed(self) -> bool:
        """Whether nothing came of it."""
        return self.end not in ("", "done", "encoded", "cancelled")

    def headers(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return headers of the request as this instance gets them."""
        return {**given, "traceparent": self.traceparent} if self.traceparent else given


@dataclass(slots=True, eq=False)
class ItemRecord:
    """One distinct item of a request.

    Attributes:
        pixels: About how many it has, by its bytes.
        nbytes: Of the body of its encode job; 0 without one.
        end: What became of it in the latest try; empty as long as that is open, which it may be
            when its request has ended.
        jobs: Its encode jobs, in the order in which they began.
    """

    modality: Modality
    pixels: int
    nbytes: int = 0
    end: ItemResult | Literal[""] = ""
    jobs: list[Leg] = field(default_factory=list)

    @property
    def brought(self) -> bool:
        """Whether an encode instance encoded it, and nothing is known against its arrival."""
        if self.end:
            return self.end in ("encoded", "retried")
        return bool(self.jobs) and self.jobs[-1].end == "encoded"


@dataclass(frozen=True, slots=True)
class Step:
    """A failure, and what was done about it.

    Attributes:
        phase: Value of a `RequestPhase`: when it failed.
    """

    at: float
    phase: str
    failure: str
    fallback: Fallback


class Listener:
    """Hears what becomes of requests, at once and in the event loop; must not raise.

    An item and its jobs may end when their request has ended.
    """

    def begun(self, record: RequestRecord) -> None:
        """A request's headers have come."""

    def leg_began(self, record: RequestRecord, leg: Leg, item: ItemRecord | None) -> None:
        """An instance is about to be asked; to encode, if an item is given."""

    def job_ended(self, record: RequestRecord, leg: Leg, item: ItemRecord) -> None:
        """An encode job has ended."""

    def item_ended(self, record: RequestRecord, item: ItemRecord) -> None:
        """It is known what became of an item in one try."""

    def stepped(self, record: RequestRecord, step: Step) -> None:
        """Something failed, and it is known what is done about it."""

    def ended(self, record: RequestRecord) -> None:
        """A request's answer has ended, or it will have none."""

    async def close(self) -> None:
        """Let go of what is held; nothing is heard any more."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request of a client.

    Attributes:
        id: ``x-request-id``.
        endpoint: Path, one of those that are served.
        began_s: When its headers had come; by ``time.time``.
        began_at: The same.
        client: First digits of the digest of the client's key; empty without keys.
        model: That was asked for; empty for whichever is served.
        read_at: When all of it was there.
        admitted_at: When it might go on to instances.
        items: Distinct images, videos and audio clips that may be encoded elsewhere.
        legs: Tries at instances that prefill or answer, in order.
        first_at: When the first byte of the answer was sent.
        ended_at: When its last byte was, or when it was clear that it has none.
        nbytes_out: Of the answer's body.
        events: In the answer; 0 of one that is no stream of events.
        output_tokens: Generated, as the answer's ``usage`` has it; ``None`` if it does not.
        traceparent: Of the client; where requests are traced, of the router's span.
    """

    id: str
    endpoint: str
    began_s: float = field(default_factory=time.time)
    began_at: float = field(default_factory=time.monotonic)
    client: str = ""
    model: str = ""
    stream: bool = False
    nbytes: int = 0
    read_at: float = 0.0
    admitted_at: float = 0.0
    items: list[ItemRecord] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    first_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    gone: bool = False
    nbytes_out: int = 0
    events: int = 0
    output_tokens: int | None = None
    traceparent: str = ""
    listeners: Sequence[Listener] = ()
    _named: dict[str, ItemRecord] = field(default_factory=dict)

    def start(self, listeners: Sequence[Listener]) -> None:
        """Let listeners hear of it from its beginning."""
        self.listeners = listeners
        for listener in listeners:
            listener.begun(self)

    def finish(self) -> None:
        """Note that nothing more is sent of its answer."""
        self.ended_at = time.monotonic()
        for listener in self.listeners:
            listener.ended(self)

    def note_items(self, items: Sequence[MediaItem]) -> None:
        """Note the items."""
        for item in items:
            one = ItemRecord(item.modality, item.pixels)
            self.items.append(one)
            self._named[item.item_uuid] = one

    def rename(self, items: Sequence[MediaItem], renamed: Sequence[MediaItem]) -> None:
        """Note other names of items; news of the old ones may still come."""
        for item, other in zip(items, renamed, strict=True):
            self._named[other.item_uuid] = self._named[item.item_uuid]

    def leg(self, stage: Duty, instance: str, item: ItemRecord | None = None) -> Leg:
        """Note that an instance is asked; it lasts as long as the ``with`` statement."""
        leg = Leg(stage, instance)
        (self.legs if item is None else item.jobs).append(leg)
        for listener in self.listeners:
            listener.leg_began(self, leg, item)
        return leg

    def job(self, item: MediaItem, encoder: str, nbytes: int) -> Leg:
        """Note that an encoder is asked for an item; until `end_job`."""
        one = self._named[item.item_uuid]
        one.nbytes = nbytes
        return self.leg("encode", encoder, one)

    def end_job(self, item: MediaItem, job: Leg, end: str) -> None:
        """Note how an encode job ended."""
        job.finish(end)
        for listener in self.listeners:
            listener.job_ended(self, job, self._named[item.item_uuid])

    def end_item(self, item: MediaItem, end: ItemResult) -> None:
        """Note what became of an item."""
        one = self._named[item.item_uuid]
        one.end = end
        for listener in self.listeners:
            listener.item_ended(self, one)

    def fall_back(
        self, phase: RequestPhase, failure: FailureKind, possible: Collection[Fallback] = ()
    ) -> Fallback:
        """Choose what is done about a failure, note it and return it; see `next_fallback`."""
        fallback = next_fallback(phase, failure, possible)
        step = Step(time.monotonic(), phase.value, failure.value, fallback)
        self.steps.append(step)
        for listener in self.listeners:
            listener.stepped(self, step)
        return fallback

    def wall_s(self, at: float) -> float:
        """Return a time of this record on the clock of ``time.time``."""
        return self.began_s + at - self.began_at

    @property
    def topology(self) -> Topology:
        """Which instances had a part in it."""
        prefilled = any(leg.stage == "prefill" and not leg.failed for leg in self.legs)
        if not self.items:
            return "p+d" if prefilled else "text"
        if any(item.brought for item in self.items):
            return "e+p+d" if prefilled else "e+pd"
        return "ep+d" if prefilled else "epd"

    @property
    def tokens(self) -> int:
        """Generated tokens by `output_tokens`, else as far as `events` say; 0 if nothing does."""
        if self.output_tokens is not None:
            return self.output_tokens
        return max(self.events - _ENDS_OF_CHAT, 0)
