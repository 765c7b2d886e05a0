"""CPU time, memory and counters of a side's processes, read from outside."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from epd_portable.errors import MeasurementError

_TIMEOUT_S = 20.0
_SCHEDULED_CLOCK = 2
"""Linux's clock of a process's time on cores, which counts finer than ``/proc`` shows it."""
_ITEMS = ("epd_front_items_total", "epd_pd_fallbacks_total")
_FALLBACK = "encoded without a transfer"
_AS_MEANT = ("encoded", "stored", "local_first", "not_needed", "cancelled")
"""Outcomes of items with which nothing went wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a side, for example ``encode-0``: a process, and all below it."""

    name: str
    pid: int
    below: bool = True
    metrics_url: str = ""


def read_cpu_s(parts: Sequence[Part]) -> dict[str, float]:
    """Return the CPU time of each part so far."""
    found: dict[str, float] = {}
    for part, process in _processes(parts):
        with contextlib.suppress(OSError):  # It has ended.
            used_s = time.clock_gettime(~process.pid << 3 | _SCHEDULED_CLOCK)
            found[part.name] = found.get(part.name, 0.0) + used_s
    return found


def read_memory_bytes(parts: Sequence[Part]) -> dict[str, int]:
    """Return the memory of each part, shared pages divided among those who share them (PSS)."""
    found: Counter[str] = Counter()
    for part, process in _processes(parts):
        with contextlib.suppress(psutil.Error):
            found[part.name] += process.memory_full_info().pss
    return found


def read_counters(parts: Sequence[Part]) -> Counter[str]:
    """Return the items of a side by outcome; `MeasurementError` if its metrics are unreachable."""
    found: Counter[str] = Counter()
    for url in dict.fromkeys(part.metrics_url for part in parts if part.metrics_url):
        try:
            response = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise MeasurementError(f"{url}: {error!r}") from error
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name in _ITEMS:
                    found[sample.labels.get("outcome", _FALLBACK)] += int(sample.value)
    return found


def untransferred(counted: Counter[str]) -> int:
    """Return the number of items that were not encoded or not transferred as intended."""
    return sum(count for outcome, count in counted.items() if outcome not in _AS_MEANT)


def _processes(parts: Sequence[Part]) -> Iterator[tuple[Part, psutil.Process]]:
    for part in parts:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(part.pid)
            for process in [root, *(root.children(recursive=True) if part.below else ())]:
                yield part, process
