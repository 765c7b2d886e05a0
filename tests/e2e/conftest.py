"""Real engines: a topology once for each folder of tests, plain vLLM once for all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_portable.config.load import load_topology
from epd_portable.config.secret import Secret
from epd_portable.demo import servers
from tests import forked
from tests.e2e import flags
from tests.e2e.asking import AUTHORIZED
from tests.e2e.engines import config_of, instance, names, shared_memory_of, wait_until
from tests.forked import Popen

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
"""Path of started processes: engines may be in a folder that only this variable names."""
CONFIG = ROOT / "configs" / "1e1pd.yaml"
ENGINE_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.qwen2_5_vl",
    "uvicorn",
    "httpx",
    "zmq",
    "tests.e2e.processors",
)
"""Modules imported by the process from which engines are forked; others are imported if needed."""
CPU_MODULES = (*ENGINE_MODULES, "vllm.v1.worker.cpu_worker")
KV_BLOCKS = 320
"""Blocks of engines on the CPU: 40,960 tokens. Each start writes all their memory, page by page."""
VIDEOS: dict[str, Any] = {"limit_mm_per_prompt": {"video": 2}, "skip_mm_profiling": True}
"""Engine arguments by which the demo's model takes videos."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A running topology and the event trace that its processes write.

    Attributes:
        url: Base address of the front.
        pid: The launcher.
        trace_dir: Of the events.
        log_dir: Of one file a process.
        flags: Where `flags` are raised.
        ready_s: From when on events count.
    """

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
            whole, _, _ = path.read_text().rpartition("\n")  # The last line may be half written.
            found += [json.loads(line) for line in whole.splitlines()]
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

    def since_now(self) -> Pair:
        """Return it as if it had become ready now: with none of the events before."""
        return Pair(
            split=dataclasses.replace(self.split, ready_s=time.monotonic()),
            reference_url=self.reference_url,
        )


Start = Callable[[Sequence[str]], Split]
"""Starts a topology with these settings, which lives as long as the module's tests."""


@contextmanager
def forking(
    modules: Sequence[str] = CPU_MODULES, env: Mapping[str, str] | None = None
) -> Iterator[Popen]:
    """Give what forks engines from a process that has imported vLLM, with these variables."""
    nursery = forked.nursery(*modules, env=env)
    try:
        yield forked.popen_of(nursery)
    finally:
        nursery.close()


@pytest.fixture(scope="session")
def fork() -> Iterator[Popen]:
    """Start engines on the CPU that need not start as users start them."""
    with forking() as popen:
        yield popen


@contextmanager
def serving(server: servers.Server, *, ready: bool = True) -> Iterator[servers.Server]:
    """Start a server, and check at its end that it leaves no shared memory.

    Args:
        server: What to start.
        ready: Whether to wait until it is.
    """
    server.start()
    with ExitStack() as ended:
        ended.callback(server.stop)
        try:
            if ready:
                server.wait_until_ready()
            yield server
        finally:
            mapped = shared_memory_of(server.pid)
    wait_until(lambda: not any(path.exists() for path in mapped), "shared memory is removed")


@contextmanager
def running(
    folder: Path,
    settings: Sequence[str],
    *,
    config: Path = CONFIG,
    platform: str = "cpu",
    env: Mapping[str, str] | None = None,
    popen: Popen = subprocess.Popen,
) -> Iterator[Split]:
    """Start a topology that writes its event trace, and stop it.

    Args:
        folder: For logs, traces and flags.
        settings: As ``--set`` takes them.
        config: The topology file.
        platform: What to start it on.
        env: Variables of the launcher.
        popen: What starts the launcher: `fork`, or as users do.
    """
    flags = folder / "flags"
    flags.mkdir()
    variables = {
        "EPD_TRACE_DIR": str(folder / "trace"),
        "EPD_TEST_FLAGS": str(flags),
        "PYTHONPATH": PYTHONPATH,
        **(env or {}),
    }
    topology = servers.topology(
        config,
        platform=platform,
        log_dir=folder / "logs",
        settings=[
            # Who encodes an item must not depend on how long others took.
            "front.elastic_encode=false",
            "front.item_outcomes=true",
            *([f"engine_args.num_gpu_blocks_override={KV_BLOCKS}"] if platform == "cpu" else []),
            *settings,
        ],
        env=variables,
    )
    topology.popen = popen
    with serving(topology) as server:
        yield Split(
            url=server.url,
            pid=server.pid,
            trace_dir=folder / "trace",
            log_dir=folder / "logs",
            flags=flags,
            ready_s=time.monotonic(),
        )


def reference(
    folder: Path, popen: Popen, *, ready: bool = True, **engine_args: Any
) -> contextlib.AbstractContextManager[servers.Server]:
    """Return plain vLLM on the CPU with the engine arguments of the topology, and these."""
    args = load_topology(CONFIG, platform="cpu").engine_args | engine_args
    args["num_gpu_blocks_override"] = KV_BLOCKS
    server = servers.one_process(
        "demo",
        log=folder / "reference.log",
        engine_args=args,
        # It would compile parts of its sampler within the first request.
        env={"TORCH_COMPILE_DISABLE": "1"},
    )
    server.popen = popen
    return serving(server, ready=ready)


@pytest.fixture(scope="session")
def begun(fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Begin to start plain vLLM in float32, once for all modules, while a topology starts.

    One with another dtype has its own.
    """
    folder = tmp_path_factory.mktemp("reference")
    with reference(folder, fork, ready=False, dtype="float32", **VIDEOS) as server:
        yield server


@pytest.fixture(scope="session")
def reference_url(begun: servers.Server) -> str:
    """Wait for that vLLM; what starts a topology names `begun` before it."""
    begun.wait_until_ready()
    return begun.url


@pytest.fixture(scope="module")
def start(fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start topologies whose processes are forked from one that has imported vLLM."""
    with ExitStack() as stack:

        def begin(settings: Sequence[str]) -> Split:
            folder = tmp_path_factory.mktemp("engines")
            return stack.enter_context(running(folder, settings, popen=fork))

        yield begin


def every_instance_is_up(split: Split, *joined: str) -> bool:
    """Tell whether the front sends requests to every engine that it knows, and items to encoders.

    An encoder that has just started is up, and gets no items before its warm-up has ended.
    """
    with httpx.Client(base_url=split.url, timeout=60, trust_env=False) as client:
        counts = client.get("/health").json()["counts"]
        if counts["up"] < sum(counts.values()):
            return False
        engines = [name for name in (*names(split.pid), *joined) if name != "front"]
        pages = [client.get(f"/epd/instances/{name}/health") for name in engines]
    return len(pages) == counts["up"] and all(page.status_code == 200 for page in pages)


@contextmanager
def encoders_drained(split: Split) -> Iterator[None]:
    """Let engines that generate tokens encode by themselves what they do not hold."""
    names = [each["name"] for each in instances(split) if each["role"] == "encode"]
    for name in names:
        _call(split, "POST", f"/epd/instances/{name}/drain")
    try:
        yield
    finally:
        for name in names:
            _call(split, "POST", f"/epd/instances/{name}/resume")


def instances(split: Split) -> list[dict[str, Any]]:
    """Return the engines as the front sees them."""
    found: list[dict[str, Any]] = _call(split, "GET", "/epd/instances")["instances"]
    return found


def _call(split: Split, method: str, path: str) -> Any:
    secret = Secret.read(config_of(instance(split.pid, "ec_consumer")).secret_file)
    headers = {"authorization": secret.sign(method, path, b"")}
    answer = httpx.request(method, split.url + path, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def forget(split: Split, *caches: str) -> None:
    """Empty these caches of all engines, or all; only with ``VLLM_SERVER_DEV_MODE``."""
    for cache in caches or ("encoder_cache", "prefix_cache"):
        url = f"{split.url}/reset_{cache}"
        answer = httpx.post(url, headers=AUTHORIZED, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text


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
    with _raised(split, flags.SLOW_STEPS, seconds):
        yield


@contextmanager
def slow_encoder(split: Split, seconds: float) -> Iterator[None]:
    """Let each module of a slow PD instance's encoder take that much longer."""
    with _raised(split, flags.SLOW_MODULES, seconds):
        yield


@contextmanager
def _raised(split: Split, name: str, seconds: float) -> Iterator[None]:
    flag = split.flags / name
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
