"""What instances say of themselves at ``/metrics``, asked only while the status page is open."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from epd_portable.delivery.instances import Instance
from epd_portable.log import say_failure
from epd_portable.router.http.upstream import Upstream, UpstreamError

logger = logging.getLogger(__name__)
_said = say_failure(logger, "asking instances for their metrics failed")

ASK_EVERY_S = 2.0
"""However many look."""
OLD_AFTER_S = 10.0
"""Figures older than this are none."""
TIMEOUT_S = 2.0
MAX_INSTANCES_ASKED = 64
"""Of more, those that come later are not asked: their pages take each engine some milliseconds."""
AT_ONCE = 8

_LINE = re.compile(
    rb"^(?P<name>vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc"
    rb"|epd_encode_queued_items|epd_pd_received_bytes_total)"
    rb"(?:\{(?P<labels>[^\n]*)\})? (?P<value>[0-9.eE+-]+)$",
    re.MULTILINE,
)
_PATH = re.compile(rb'(?:^|,)path="([a-z_0-9]{1,32})"')


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself.

    Attributes:
        running: Requests that its engine computes for, as `waiting`; ``None`` if it does not say.
        waiting: Requests in the engine's queue.
        kv_used: Used part of its KV cache, 0 to 1; ``None`` if it does not say.
        queued_items: Items that it is to encode; ``None`` if it is no encode instance.
        received_bytes: Bytes of items that it has received since it started, by path.
    """

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    queued_items: int | None = None
    received_bytes: dict[str, int] = {}


def read_figures(page: bytes) -> EngineFigures:
    """Return what a page in Prometheus' text format says; several engines are added up."""
    found: dict[str, list[float]] = {}
    received: dict[str, int] = {}
    for line in _LINE.finditer(page):
        name, value = line["name"].decode(), float(line["value"])
        found.setdefault(name, []).append(value)
        if name == "epd_pd_received_bytes_total":
            path = _PATH.search(line["labels"] or b"")
            where = path[1].decode() if path else ""
            received[where] = received.get(where, 0) + int(value)

    def count(name: str) -> int | None:
        return int(sum(found[name])) if name in found else None

    return EngineFigures(
        running=count("vllm:num_requests_running"),
        waiting=count("vllm:num_requests_waiting"),
        kv_used=max(found.get("vllm:kv_cache_usage_perc", ()), default=None),
        queued_items=count("epd_encode_queued_items"),
        received_bytes=received,
    )


class EngineWatch:
    """Asks instances for their figures while the status page is open."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._known: dict[str, tuple[float, EngineFigures]] = {}
        self._asked_at = -ASK_EVERY_S
        self._asking: asyncio.Task[None] | None = None

    def of(self, instances: Sequence[Instance]) -> Mapping[str, EngineFigures]:
        """Return what is known by name; what is not, or is old, is asked for, for the next call.

        Never waits.
        """
        now = self._clock()
        known = self._known.items()
        self._known = {name: each for name, each in known if now - each[0] < OLD_AFTER_S}
        done = self._asking is None or self._asking.done()
        if done and now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            healthy = [each for each in instances[:MAX_INSTANCES_ASKED] if each.healthy]
            self._asking = asyncio.create_task(self._ask_all(healthy))
            self._asking.add_done_callback(_said)
        return {name: figures for name, (_, figures) in self._known.items()}

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_all(self, instances: Sequence[Instance]) -> None:
        some = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._ask(each, some) for each in instances))

    async def _ask(self, instance: Instance, some: asyncio.Semaphore) -> None:
        async with some:
            try:
                status, _, page = await self._upstream.ask(
                    "GET", f"{instance.url}/metrics", timeout_s=TIMEOUT_S
                )
            except UpstreamError as error:
                # Its health is known by probes.
                logger.debug("metrics of %s: %s", instance.name, error)
                return
        if status == 200:
            self._known[instance.name] = (self._clock(), read_figures(page))
