"""Estimates of instances: seconds of their work, and likely content of their caches. Pure.

Encoders are observed item by item. An instance computes several responses in one step, so each is
charged an equal part of the time that it shares with the others.

Sizes are powers of two: of the estimated number of pixels, so a model that scales large images down
is followed, or of the prompt's tokens to compute. An unknown size is taken for the next smaller or
larger one.

Engines do not report what they evict from prefix caches, so that estimate has a bound.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from epd_portable.config.roles import Role
from epd_portable.media.limits import RequestItem

_NEW_ITEM = 0.2
"""Weight of the latest item in the average."""
_JOBS = 5
"""Latest jobs of an encoder for items of one size, of which more than half must be known."""
_REMEASURE_AFTER = 100
"""Time of jobs of others, in times of an encoder, after which it is measured again."""
_NEW_RESPONSE = 0.05
"""Weight of the latest response in the average."""
_FORGET = 1.001
"""Growth of the least average with each response, as a factor."""

_PACE_S = 10.0
"""Busy time over which a pace is observed; what is older fades."""

_Kind: TypeAlias = tuple[str, int]
"""Modality, and the power of two of the number of pixels."""
K = TypeVar("K", bound=Hashable)
_Found = TypeVar("_Found")


class _Jobs(NamedTuple):
    """Latest jobs of an encoder for items of one size.

    Attributes:
        seconds: Of each.
        until_s: Time of all encoders' jobs at the end of its latest one.
    """

    seconds: deque[float]
    until_s: float


class EncodeTimes:
    """Seconds that encoders take for an item, by modality and size.

    Of all together the average. Of each the median of a few jobs: a first one that loads kernels,
    and a busy moment, make no encoder slow. An encoder that got no items while the others worked
    for 100 times its median is taken for the average until its next job, if that is less.
    """

    def __init__(self) -> None:
        self._averages: dict[_Kind, float] = {}
        self._jobs: defaultdict[_Kind, dict[str, _Jobs]] = defaultdict(dict)
        self._medians: defaultdict[str, dict[_Kind, float]] = defaultdict(dict)
        self._total_s: defaultdict[_Kind, float] = defaultdict(float)

    def observe(self, item: RequestItem, seconds: float, encoder: str) -> None:
        """Take in one encode job of an encoder, given by its name."""
        kind = item.modality, item.pixels.bit_length()
        average = self._averages.get(kind, seconds)
        self._averages[kind] = average + _NEW_ITEM * (seconds - average)
        self._total_s[kind] += seconds
        jobs = self._jobs[kind]
        own = jobs[encoder].seconds if encoder in jobs else deque[float](maxlen=_JOBS)
        own.append(seconds)
        jobs[encoder] = _Jobs(own, self._total_s[kind])
        if len(own) > _JOBS // 2:
            self._medians[encoder][kind] = statistics.median_low(own)
        self._remeasure_idle(kind)

    def _remeasure_idle(self, kind: _Kind) -> None:
        """Take encoders without a job for long for the average; the next one decides with two."""
        total_s = self._total_s[kind]
        for encoder, (seconds, until_s) in self._jobs[kind].items():
            medians = self._medians[encoder]
            if total_s - until_s < _REMEASURE_AFTER * medians.get(kind, math.inf):
                continue
            while len(seconds) > _JOBS // 2:
                seconds.popleft()
            # A slow job of another may just have raised the average.
            medians[kind] = min(medians[kind], self._averages[kind])

    def of(self, item: RequestItem, encoder: str = "") -> float:
        """Return the seconds that an encoder takes for an item; 0 for an unknown size.

        Without a name, or after few jobs of that size, the average of all.
        """
        known = self._medians.get(encoder, {})
        for found in (known, self._averages):
            if (seconds := _nearest(found, item.modality, item.pixels)) is not None:
                return seconds
        return 0.0

    def forget(self, encoder: str) -> None:
        """Drop what is known of an encoder that has left."""
        self._medians.pop(encoder, None)
        for jobs in self._jobs.values():
            jobs.pop(encoder, None)


class Work:
    """Work that came, and seconds for a response, by role and size of the prompt.

    With few requests at a time each has a large part of an instance, which could do more in the
    same time. Responses are taken for the least that they took on average, forgotten slowly.

    Attributes:
        came_s: Seconds of work that came, by role, modality and size; a prompt's modality is
            ``text``. An item belongs to ``encode``, wherever it is encoded. Unknown work is 0.
    """

    def __init__(self) -> None:
        self.came_s: defaultdict[tuple[Role, str, int], float] = defaultdict(float)
        self._responses_s: dict[tuple[str, int], tuple[float, float]] = {}

    def item_came(self, item: RequestItem, seconds: float) -> None:
        """Count an item to encode."""
        self.came_s["encode", item.modality, item.pixels.bit_length()] += seconds

    def prompt_came(self, role: Role, tokens: int) -> None:
        """Count a prompt with ``tokens`` to compute."""
        self.came_s[role, "text", tokens.bit_length()] += self.response_s(role, tokens)

    def response_s(self, role: Role, tokens: int) -> float:
        """Return the seconds for a response; 0 for an unknown size of the prompt."""
        return (_nearest(self._responses_s, role, tokens) or (0.0, 0.0))[1]

    def observe_response(self, role: Role, tokens: int, seconds: float) -> None:
        """Take in one response."""
        kind = role, tokens.bit_length()
        average, least = self._responses_s.get(kind, (seconds, seconds))
        average += _NEW_RESPONSE * (seconds - average)
        self._responses_s[kind] = average, min(average, _FORGET * least)


class ResponseTimes:
    """Time of one instance, of which all requests that it computes have an equal part.

    Attributes:
        backlog_ms: Work of open responses, in whole milliseconds: sums of floats would drift.
        running: Requests that wait for no item.
    """

    def __init__(self, work: Work, role: Role, clock: Callable[[], float]) -> None:
        self.backlog_ms = self.running = 0
        self._work = work
        self._role: Role = role
        self._clock = clock
        self._each_s = self._until = 0.0

    def begin(self) -> float:
        """Count one more request; return the seconds that each had until now."""
        since_s = self.each_s()
        self.running += 1
        return since_s

    def end(self) -> None:
        """Count one request less."""
        self.each_s()
        self.running -= 1

    def each_s(self) -> float:
        """Return the seconds that a request has had, if it ran from the beginning."""
        now = self._clock()
        if self.running:
            self._each_s += (now - self._until) / self.running
        self._until = now
        return self._each_s

    def expected_ms(self, tokens: int) -> int:
        """Return the work of a response to a prompt with ``tokens`` to compute."""
        return round(1000 * self._work.response_s(self._role, tokens))

    def observe(self, tokens: int, since_s: float) -> None:
        """Learn from a response that ends; ``since_s`` was returned by `begin`."""
        self._work.observe_response(self._role, tokens, self.each_s() - since_s)


def _nearest(found: Mapping[tuple[str, int], _Found], name: str, amount: int) -> _Found | None:
    """Return what is known of a size, or of the next smaller or larger one."""
    size = amount.bit_length()
    for near in (size, size - 1, size + 1):
        if (known := found.get((name, near))) is not None:
            return known
    return None


class Pace:
    """Ends of work in busy time: idle time does not show how fast work is done."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    @property
    def seconds_each(self) -> float:
        """Busy seconds for each end.

        What is under way counts as ended now: of work that has stalled longer times result.
        """
        return self._busy_s / (self._ended + 1)

    def see(self, now_s: float, *, busy: bool) -> None:
        """Let time pass; ``busy`` is whether there was work since the last call."""
        if busy:
            self._busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def count_end(self) -> None:
        """Count one end, now."""
        self._ended += 1
        if self._busy_s > _PACE_S:
            self._ended *= _PACE_S / self._busy_s
            self._busy_s = _PACE_S


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, cut into blocks.

    Attributes:
        blocks: Their names, each made of its content and of all before it: equal for two prompts
            up to the end of their common beginning.
        ends: Tokens up to the end of each.
        tokens: Of all of it, also beyond the blocks, and those that items are taken for.
    """

    blocks: Sequence[int] = ()
    ends: Sequence[int] = ()
    tokens: int = 0

    def up_to(self, count: int) -> int:
        """Return how many tokens the first blocks have."""
        return self.ends[count - 1] if count else 0


NO_PROMPT = Prompt()


class Recent(dict[K, None]):
    """The keys that were used last, at most so many."""

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, keys: Iterable[K]) -> None:
        """Take keys as used, the last one last."""
        for key in keys:
            self.pop(key, None)
            self[key] = None
        # In one go: each look for the first one passes the places of those that are gone.
        for key in [*itertools.islice(self, max(0, len(self) - self._most))]:
            del self[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSizes:
    """Number of items, and of blocks of prompts, that an instance is taken to keep."""

    items: int = 2048
    blocks: int = 31_250


class CacheEstimate:
    """Likely content of the caches of one instance, by what it was given.

    Attributes:
        items: Encoder outputs, by name.
        blocks: Of prompts, each as a hash of it and of all before it.
    """

    __slots__ = ("blocks", "items")

    def __init__(self, sizes: CacheSizes) -> None:
        self.items: Recent[str] = Recent(sizes.items)
        self.blocks: Recent[int] = Recent(sizes.blocks)

    def prefix(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are here.

        An instance that has a block has those before it: they are named and kept together.
        """
        if not blocks or blocks[0] not in self.blocks:
            return 0
        return bisect.bisect_left(blocks, True, key=lambda block: block not in self.blocks)

    def use_prefix(self, blocks: Sequence[int]) -> None:
        """Take a request's blocks as computed here; the first of them stays longest."""
        self.blocks.use(reversed(blocks))

    def clear(self) -> None:
        """Take everything as gone: the instance was restarted, or has left."""
        self.items.clear()
        self.blocks.clear()
