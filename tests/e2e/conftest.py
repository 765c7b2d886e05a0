"""Real engines: a topology, plain vLLM, or both, once for each module of tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_portable.bench import servers
from epd_portable.config.load import load_topology
from tests.e2e import flags

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "1e1pd.yaml"


@dataclass(frozen=True, kw_only=True)
class Split:
    """A running topology and the event trace that its processes write."""

    url: str
    pid: int
    trace_dir: Path
    log_dir: Path
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

    def encoding(self, since_s: float) -> set[str]:
        """Return the instances that have begun to encode since then."""
        return {event["instance"] for event in self.events("encode.begin", since_s=since_s)}

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


IN_ENGINE = (
    "engine_args.distributed_executor_backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"
)
"""The worker in the engine's process, as vLLM has it by itself on one device that is not a CPU."""

Start = Callable[[Sequence[str]], Pair]
"""Starts a topology with these settings."""


@contextmanager
def running(
    folder: Path,
    settings: Sequence[str],
    *,
    platform: str = "cpu",
    env: Mapping[str, str] | None = None,
) -> Iterator[Split]:
    """Start a topology that writes its event trace, and stop it."""
    flags = folder / "flags"
    flags.mkdir()
    variables = {
        "EPD_TRACE_DIR": str(folder / "trace"),
        "EPD_TEST_FLAGS": str(flags),
        "PYTHONPATH": str(ROOT),
        **(env or {}),
    }
    with servers.topology(
        CONFIG, platform=platform, log_dir=folder / "logs", settings=settings, env=variables
    ) as server:
        yield Split(
            url=server.url,
            pid=server.pid,
            trace_dir=folder / "trace",
            log_dir=folder / "logs",
            flags=flags,
            ready_s=time.monotonic(),
        )


def reference(folder: Path, **engine_args: Any) -> servers.Server:
    """Return plain vLLM on the CPU with the engine arguments of the topology, and these."""
    args = load_topology(CONFIG, platform="cpu").engine_args | engine_args
    return servers.one_process("demo", log=folder / "reference.log", engine_args=args)


@contextmanager
def without_compiling() -> Iterator[None]:
    """Let engines that start here compile nothing: each takes ten seconds for the sampler alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def compiling() -> Iterator[None]:
    """Whether engines compile; a module that serves as users do defines it anew."""
    with without_compiling():
        yield


@pytest.fixture(scope="package")
def reference_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Plain vLLM in float32, started once for all modules; one with another dtype has its own."""
    with ExitStack() as stack:
        with without_compiling():
            folder = tmp_path_factory.mktemp("reference")
            server = stack.enter_context(reference(folder, dtype="float32"))
        yield server.url


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, reference_url: str) -> Iterator[Start]:
    """Start topologies that live as long as the module's tests, beside the reference."""
    with ExitStack() as stack:

        def begin(settings: Sequence[str]) -> Pair:
            folder = tmp_path_factory.mktemp("engines")
            split = stack.enter_context(running(folder, settings))
            return Pair(split=split, reference_url=reference_url)

        yield begin


@contextmanager
def encoders_held(split: Split) -> Iterator[float]:
    """Let no slow encoder end what it begins; gives the time from which that holds."""
    flag = split.flags / flags.HOLD
    flag.touch()
    try:
        yield time.monotonic()
    finally:
        flag.unlink()


@contextmanager
def slow_steps(split: Split, seconds: float) -> Iterator[None]:
    """Let each step of a slow PD instance take that much longer."""
    flag = split.flags / flags.SLOW_STEPS
    flag.write_text(str(seconds))
    try:
        yield
    finally:
        flag.unlink()


@pytest.fixture
def slow(pair: Pair) -> Iterator[Callable[[float], Any]]:
    """Set how much longer a module's slow encoder takes for the items of one step."""
    flag = pair.split.flags / flags.SLOW
    yield lambda seconds: flag.write_text(str(seconds))
    flag.unlink(missing_ok=True)
