"""What a side's processes use and count, seen from outside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from epd_portable.bench.cpu_time import own_s
from epd_portable.errors import MeasurementError

_TIMEOUT_S = 20.0
_SUMS = {
    "epd_pd_fallbacks_total": "fallbacks",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}
_ENCODED = {
    ("epd_encode_transfers_total", "encoder"),
    ("epd_encode_transfers_total", "cache"),
    ("epd_pd_items_total", "local"),
}
_TITLES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a side, with all processes below it.

    Attributes:
        name: For example ``encode-0``, ``router``.
        pid: Of its first process.
        cores: Where all of it must run; empty where that is not held to.
        api_cores: Where its first process may run as well.
        below: Whether processes that it started belong to it.
        metrics_url: Where it tells what it counts; empty for nowhere.
    """

    name: str
    pid: int
    cores: frozenset[int] = frozenset()
    api_cores: frozenset[int] = frozenset()
    below: bool = True
    metrics_url: str = ""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a part, in bytes.

    Attributes:
        rss_bytes: Pages that are present; what processes share counts for each.
        pss_bytes: The same with shared pages divided among those who share them.
    """

    rss_bytes: int
    pss_bytes: int


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What a side's own metrics say.

    Attributes:
        outcomes: Items by what became of them, as the router counts them.
        ladder: Steps down the failure ladder.
        fallbacks: Items that a prefill+decode instance encoded although a transfer was expected.
        encoded: Items of encode jobs by where their output came from (``encoder``, ``cache``), and
            those that other instances encoded (``local``).
        prefix_queries: Prompt tokens that engines looked for in their KV prefix caches.
        prefix_hits: Those that they found.
    """

    outcomes: dict[str, float] = {}
    ladder: dict[str, float] = {}
    fallbacks: float = 0.0
    encoded: dict[str, float] = {}
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0

    def since(self, earlier: Counted) -> Counted:
        """Return what was counted since an earlier reading; what did not happen is left out."""
        return Counted(
            outcomes=_risen(self.outcomes, earlier.outcomes),
            ladder=_risen(self.ladder, earlier.ladder),
            fallbacks=self.fallbacks - earlier.fallbacks,
            encoded=_risen(self.encoded, earlier.encoded),
            prefix_queries=self.prefix_queries - earlier.prefix_queries,
            prefix_hits=self.prefix_hits - earlier.prefix_hits,
        )


def cpu_s(parts: Sequence[Part]) -> dict[str, dict[str, float]]:
    """Return the CPU time that each process has used so far, by part and by what it is."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        used = found.setdefault(part.name, {})
        for process, role in _processes(part):
            used[role] = used.get(role, 0.0) + own_s(process)
    return found


def used(
    after: dict[str, dict[str, float]], before: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the difference of two readings of `cpu_s`."""
    return {
        name: {
            role: max(0.0, seconds - before.get(name, {}).get(role, 0.0))
            for role, seconds in roles.items()
        }
        for name, roles in after.items()
    }


def memory(parts: Sequence[Part]) -> dict[str, Memory]:
    """Return the memory of each part; takes a tenth of a second for each gigabyte."""
    found = {}
    for part in parts:
        rss_bytes = pss_bytes = 0
        for process, _ in _processes(part):
            with contextlib.suppress(psutil.Error):
                whole = process.memory_full_info()
                rss_bytes += whole.rss
                pss_bytes += whole.pss
        found[part.name] = Memory(rss_bytes=rss_bytes, pss_bytes=pss_bytes)
    return found


def counted(parts: Sequence[Part]) -> Counted:
    """Read the metrics of a side.

    Raises:
        MeasurementError: A part that tells what it counts does not answer.
    """
    found = Counted()
    sums = dict.fromkeys(_SUMS.values(), 0.0)
    for part in parts:
        if not part.metrics_url:
            continue
        try:
            answer = httpx.get(part.metrics_url, timeout=_TIMEOUT_S, trust_env=False)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise MeasurementError(f"{part.name}: {part.metrics_url}: {error!r}") from error
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name == "epd_router_items_total":
                    found.outcomes[sample.labels["outcome"]] = sample.value
                elif sample.name == "epd_router_fallbacks_total":
                    name = sample.labels["fallback"]
                    found.ladder[name] = found.ladder.get(name, 0.0) + sample.value
                elif sample.name in _SUMS:
                    sums[_SUMS[sample.name]] += sample.value
                else:
                    source = sample.labels.get("source", "")
                    if (sample.name, source) in _ENCODED:
                        found.encoded[source] = found.encoded.get(source, 0.0) + sample.value
    return msgspec.structs.replace(found, **sums)


def check_cores(parts: Sequence[Part]) -> None:
    """Check that every thread of every bound part runs on its cores only.

    Raises:
        MeasurementError: One may run elsewhere: the sides would not be equal.
    """
    for part in parts:
        if not part.cores:
            continue
        for process, _ in _processes(part):
            for thread in _threads(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    allowed = part.cores
                    if process.pid == part.pid:
                        allowed = allowed | part.api_cores
                    outside = os.sched_getaffinity(thread) - allowed
                    if outside:
                        raise MeasurementError(
                            f"{part.name}: a thread of process {process.pid} may run on core "
                            f"{min(outside)}, outside its cores {sorted(allowed)}: the sides "
                            "would not be equal"
                        )


def _processes(part: Part) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the living processes of a part, and what each is."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(part.pid)
        children = root.children(recursive=True) if part.below else []
        engine = any("vllm.entrypoints" in word for word in root.cmdline())
        yield root, "API server" if engine else part.name
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield child, _role(child, part.pid)


def _role(process: psutil.Process, root: int) -> str:
    """Say what a process below an API server is."""
    words = process.cmdline()
    title = words[0] if words else ""
    for begin, role in _TITLES.items():
        if title.startswith(begin):
            return role
    # vLLM cannot give every process its title; these are made in the same way, all the same.
    if any("spawn_main" in word for word in words):
        return "engine core" if process.ppid() == root else "worker"
    return "other"


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def _risen(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    risen = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in risen.items() if value}
