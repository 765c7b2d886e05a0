"""What a side's processes use and count, read from outside."""

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
_COUNTERS = {
    "epd_router_items_total": ("items", "outcome"),
    "epd_front_items_total": ("items", "outcome"),
    "epd_router_fallbacks_total": ("fallback", "fallback"),
    "epd_pd_fallbacks_total": ("untransferred", ""),
    "epd_encode_transfers_total": ("encoded", "source"),
    "epd_pd_items_total": ("placed", "source"),
    "vllm:prefix_cache_queries_total": ("prefix queries", ""),
    "vllm:prefix_cache_hits_total": ("prefix hits", ""),
}
"""Metrics by the name that they have in `read_counters`, and the label that is added to it."""
_TITLES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}
_ROOTS = {"vllm.entrypoints": "API server", "epd_portable.engine.core": "engine core"}
"""What the first process of a part is, by the module that it runs."""

CPUSeconds = dict[str, float]
"""CPU time by part of a side and what its processes are, as ``encode-0 engine core``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a side, with all processes below it.

    Attributes:
        name: For example ``encode-0``, ``router``.
        pid: Of its first process.
        below: Whether processes that it started belong to it.
        metrics_url: Of its metrics; empty for none.
    """

    name: str
    pid: int
    below: bool = True
    metrics_url: str = ""


def read_cpu_s(parts: Sequence[Part]) -> CPUSeconds:
    """Return the CPU time that all processes have used so far."""
    found: CPUSeconds = {}
    for part in parts:
        for process, role in _processes(part):
            name = part.name if role == part.name else f"{part.name} {role}"
            with contextlib.suppress(OSError):  # It has ended.
                clock = ~process.pid << 3 | _SCHEDULED_CLOCK
                found[name] = found.get(name, 0.0) + time.clock_gettime(clock)
    return found


def cpu_s_since(after: CPUSeconds, before: CPUSeconds) -> CPUSeconds:
    """Return the difference of two readings."""
    return {name: max(0.0, used_s - before.get(name, 0.0)) for name, used_s in after.items()}


def read_memory_bytes(parts: Sequence[Part]) -> dict[str, int]:
    """Return the memory of each part, shared pages divided among those who share them (PSS)."""
    found: Counter[str] = Counter()
    for part in parts:
        for process, _ in _processes(part):
            with contextlib.suppress(psutil.Error):
                found[part.name] += process.memory_full_info().pss
    return found


def read_counters(parts: Sequence[Part]) -> Counter[str]:
    """Return what the metrics of a side count, summed over its parts.

    Raises:
        MeasurementError: A part with metrics does not answer.
    """
    found: Counter[str] = Counter()
    for url in dict.fromkeys(part.metrics_url for part in parts if part.metrics_url):
        try:
            answer = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise MeasurementError(f"{url}: {error!r}") from error
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name in _COUNTERS:
                    name, label = _COUNTERS[sample.name]
                    key = f"{name} {sample.labels.get(label, '')}".strip()
                    found[key] += int(sample.value)
    return found


def _processes(part: Part) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the living processes of a part, and what each is."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(part.pid)
        children = root.children(recursive=True) if part.below else []
        words = root.cmdline()
        roles = (role for module, role in _ROOTS.items() if any(module in word for word in words))
        yield root, next(roles, part.name)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield child, _role(child, part.pid)


def _role(process: psutil.Process, root: int) -> str:
    """Return what a process below an API server is."""
    words = process.cmdline()
    for title, role in _TITLES.items():
        if words and words[0].startswith(title):
            return role
    # vLLM cannot give every process its title; these are made in the same way, all the same.
    if any("spawn_main" in word for word in words):
        return "engine core" if process.ppid() == root else "worker"
    return "other"
