"""Real engines: a topology, plain vLLM, or both, once for each module of tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_portable.bench import servers
from epd_portable.config.load import load_topology

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "1e1pd.yaml"


@dataclass(frozen=True, kw_only=True)
class Split:
    """A running topology and the event trace that its processes write."""

    url: str
    pid: int
    trace_dir: Path
    flags: Path
    ready_s: float

    def events(self, name: str = "", *, since_s: float | None = None) -> list[dict[str, Any]]:
        """Return events in the order of time.

        Args:
            name: Only those; empty for all.
            since_s: Only later ones; ``None`` leaves out what came before it was ready.
        """
        begin_s = self.ready_s if since_s is None else since_s
        found = []
        for path in self.trace_dir.glob("*.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines()]
        found.sort(key=lambda event: event["t_s"])
        return [
            event for event in found if event["t_s"] >= begin_s and name in ("", event["event"])
        ]

    def encoded_by(self, role: str) -> list[str]:
        """Return the items that instances of a role have encoded."""
        return [
            item
            for event in self.events("encode.begin")
            if event["instance"].startswith(role)
            for item in event["items"]
        ]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A topology and plain vLLM with the same model and engine arguments."""

    split: Split
    reference_url: str


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Start topologies and references that live as long as the module's tests."""
    with ExitStack() as stack:

        def begin(settings: Sequence[str], *, reference_args: dict[str, Any] | None = None) -> Any:
            folder = tmp_path_factory.mktemp("engines")
            flags = folder / "flags"
            flags.mkdir()
            env = {
                "EPD_TRACE_DIR": str(folder / "trace"),
                "EPD_TEST_FLAGS": str(flags),
                "PYTHONPATH": str(ROOT),
            }
            topology = servers.topology(
                CONFIG, platform="cpu", log_dir=folder / "logs", settings=settings, env=env
            )
            pending = [topology]
            if reference_args is not None:
                args = load_topology(CONFIG, platform="cpu").engine_args | reference_args
                pending.append(
                    servers.one_process("demo", log=folder / "reference.log", engine_args=args)
                )
            with ThreadPoolExecutor() as pool:
                running = list(pool.map(stack.enter_context, pending))
            split = Split(
                url=running[0].url,
                pid=running[0].pid,
                trace_dir=folder / "trace",
                flags=flags,
                ready_s=time.monotonic(),
            )
            if reference_args is None:
                return split
            return Pair(split=split, reference_url=running[1].url)

        yield begin
