"""Exposes metrics of an engine's processes on the ``/metrics`` page of its API server.

That page shows the API server's own registry (vLLM 0.26 to 0.33). So scheduler and workers write
their values in prometheus_client's multi-process form, and a collector in that registry reads them.
vLLM's series stay as they are.

Where ``PROMETHEUS_MULTIPROC_DIR`` is set (by vLLM for several API servers, or by the user), vLLM
serves that folder, and the values go there.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from prometheus_client import REGISTRY, values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from epd_portable import envs

logger = logging.getLogger(__name__)

_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_PREFIX = "epd_"
_ENDED = "ended"
"""In the names of files in place of a process id."""


class FolderCollector(Collector):
    """Reads this package's series from a folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the series depend on the other processes."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return each series, added up over the processes; gauges over those that run."""
        if not self._folder.is_dir():
            return ()
        # Other API servers may read the folder, too.
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _merge_ended(self._folder)
            files = MultiProcessCollector(None, str(self._folder))  # type: ignore[no-untyped-call]
            metrics: Iterable[Metric] = files.collect()  # type: ignore[no-untyped-call]
        return [metric for metric in metrics if metric.name.startswith(_PREFIX)]


def _merge_ended(folder: Path) -> None:
    """Merge the files of processes that have ended: each restart would leave another of each kind.

    Gauges of such a process are removed, or an engine that was restarted would be counted again.
    """
    for path in folder.glob("*_*.db"):
        kind, _, pid = path.stem.rpartition("_")
        if not pid.isdecimal() or Path("/proc", pid).exists():
            continue
        merged = path.with_stem(f"{kind}_{_ENDED}")
        if kind.startswith("gauge_live"):
            path.unlink()
        elif not merged.exists():
            path.rename(merged)
        else:
            _add(path, merged)
            path.unlink()


def _add(path: Path, total: Path) -> None:
    """Add the values of a file to those of another."""
    sums = MmapedDict(str(total))  # type: ignore[no-untyped-call]
    for key, value, when, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
        sums.write_value(key, sums.read_value(key)[0] + value, when)  # type: ignore[no-untyped-call]
    sums.close()  # type: ignore[no-untyped-call]


@cache
def serve() -> None:
    """Expose the metrics of this process's children; does nothing the second time.

    The first process of an engine names the folder in its environment, and removes it at its end.
    """
    if _MULTIPROCESS in os.environ:
        return
    folder = envs.EPD_METRICS_DIR.get()
    if not folder:
        folder = str(Path(tempfile.gettempdir(), f"epd-metrics-{secrets.token_hex(8)}"))
        os.environ[envs.EPD_METRICS_DIR.name] = folder
        atexit.register(_remove, folder, os.getpid())
    REGISTRY.register(FolderCollector(Path(folder)))


def publish() -> None:
    """Publish this process's metrics, from now on, for the API server's page."""
    if _MULTIPROCESS not in os.environ:
        folder = envs.EPD_METRICS_DIR.get()
        if not folder:
            logger.warning(
                "this process's metrics are not on the engine's /metrics page: let VLLM_PLUGINS "
                "name epd_portable too, or leave it unset"
            )
            return
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[_MULTIPROCESS] = folder
    if values.ValueClass is values.MutexValue:
        # prometheus_client reads the variable on import, which vLLM has done.
        values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
