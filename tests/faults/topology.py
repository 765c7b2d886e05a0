"""Whole topologies of small engines under the real launcher and behind the real front."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.roles import Role
from epd_portable.config.store import StoreSection
from epd_portable.launch.environment import shm_prefix
from epd_portable.launch.plan.engine import CONNECTOR, ROLE_ARGS, render_arguments
from epd_portable.launch.plan.machine import is_free, port_source
from epd_portable.launch.run import sessions
from tests import forked, warm
from tests.faults import census
from tests.faults.census import Census
from tests.faults.points import Faults
from tests.faults.small.pictures import Picture
from tests.faults.small.steps import STATES
from tests.keyring import secret_file

ROOT = Path(__file__).parents[2]
LEASE_S, WAIT_S = 1.0, 4.0
REQUEST_DEADLINE_S = 5 * WAIT_S
"""Seconds: two tries of which each waits for its items, and what lies between."""
DEADLINE_S = 60.0
START_S = 180.0
"""Seconds for the start of all processes at once, with torch."""
POOL_BYTES = 4 << 20
MODEL = ROOT / "epd_portable" / "demo" / "model"
PYTHONPATH = f"{Faults.HOOKS}:{ROOT}"
ENGINE_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm.v1.worker.cpu_worker",
    "torch.distributed",
    "uvicorn",
    "httpx",
    "zmq",
)
"""Modules that the launchers' common parent has imported."""
_POLL_S = 0.05
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without certificates: httpx reads all that there are for every request, or takes this."""


@functools.cache
def nursery() -> warm.Nursery:
    """Return the process that launchers are forked from, and all that they start."""
    made = forked.nursery(*MODULES, env={"PYTHONPATH": PYTHONPATH})
    atexit.register(made.close)
    return made


@dataclass(frozen=True)
class Reply:
    """Result of a request.

    Attributes:
        status: 0 if the connection broke, or the response was not ended by the model.
        text: Of the answer, or the error's message.
        sources: How each item was had.
        seconds: How long it took.
    """

    status: int
    text: str
    sources: tuple[str, ...] = ()
    seconds: float = 0.0


def role_of(config: InstanceConfig) -> Role:
    """Return the role of a small engine."""
    return "prefill-decode" if config.pool else "encode"


class Topology:
    """A run: encoders and PD instances, the front and the launcher.

    Args:
        folder: For logs and traces; made here.
        encoders: The path that each encoder offers.
        prefills: The path that each PD instance offers.
        pool_bytes: Of each.
        lease_s: See `InstanceConfig`.
        wait_s: See `InstanceConfig`.
        env: Variables for every process.
        store: Of all of them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        encoders: Sequence[str] = ("shm", "tcp"),
        prefills: Sequence[str] = ("auto", "auto"),
        pool_bytes: int = POOL_BYTES,
        lease_s: float = LEASE_S,
        wait_s: float = WAIT_S,
        env: Mapping[str, str] | None = None,
        store: StoreSection | None = None,
    ) -> None:
        self.run_id = secrets.token_hex(4)
        self.folder = folder
        self.temp_dir = folder / "temp"
        self.log_dir = folder / "logs"
        self.trace_dir = folder / "trace"
        self.temp_dir.mkdir(parents=True)
        self.log_dir.mkdir()
        self.faults = Faults(folder / "faults")
        self.states = folder / "states"
        self.states.mkdir()
        configs = [
            InstanceConfig(
                instance=f"{role.replace('-', '_')}-{index}",
                platform="cpu",
                path=path,
                wait_timeout_s=wait_s,
                lease_s=lease_s,
                secret_file=secret_file(),
                store=store,
            )
            for role, paths in (("encode", encoders), ("prefill-decode", prefills))
            for index, path in enumerate(paths)
        ]
        ports = port_source(self.run_id)
        self.ports: list[int] = []

        def next_port() -> int:
            self.ports.append(ports())
            return self.ports[-1]

        configs = [
            each
            if each.instance.startswith("encode")
            else each.model_copy(
                update={
                    "control_address": f"tcp://127.0.0.1:{next_port()}",
                    "data_address": f"tcp://127.0.0.1:{next_port()}",
                    "pool": f"{shm_prefix(self.run_id)}{each.instance}",
                    "pool_bytes": pool_bytes,
                }
            )
            for each in configs
        ]
        self.names = [each.instance for each in configs]
        specs = self._processes(configs, next_port)
        plan = folder / "plan.json"
        plan.write_text(
            json.dumps(
                {
                    "run_id": self.run_id,
                    "processes": specs,
                    "launch": {"stop_grace_s": 2.0},
                    "pauses_s": [0.05, 0.1],
                    "secret": Path(secret_file()).read_text("utf-8").strip(),
                    "log_dir": str(self.log_dir),
                    "temp_dir": str(self.temp_dir),
                }
            )
        )
        self._lines: queue.Queue[str] = queue.Queue()
        variables = {
            **os.environ,
            **self.faults.environment,
            "PYTHONPATH": PYTHONPATH,
            "EPD_TRACE_DIR": str(self.trace_dir),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.process = self._start(plan, variables)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.faults.know("launcher", self.process.pid)
        try:
            self.wait_for("ready:")
        except BaseException:
            self.close()
            raise

    def _processes(
        self, configs: Sequence[InstanceConfig], next_port: Callable[[], int]
    ) -> list[dict[str, Any]]:
        """Return the processes of the plan: engines, and the front last."""
        port = next_port()
        self.url = f"http://127.0.0.1:{port}"
        meeting = str(self.temp_dir / "front")
        specs, engines, arguments = [], [], []
        for config in configs:
            name, role = config.instance, role_of(config)
            arguments = self._arguments(config, role)
            argv = [sys.executable, "-m", "tests.faults.small.engine", json.dumps([meeting])]
            url = f"{self.url}/epd/instances/{name}"
            specs.append(self._spec(name, role, [*argv, *arguments], url, config.pool))
            engines.append({"name": name, "role": role, "control": config.control_address})
        settings = {
            "engines": engines,
            "sockets": [meeting],
            "secret_file": secret_file(),
            "wait_timeout_s": configs[0].wait_timeout_s,
            "front": {"elastic_encode": False, "item_outcomes": True},
            "store": store.model_dump(mode="json") if (store := configs[0].store) else None,
        }
        argv = [sys.executable, "-m", "epd_portable.front.server"]
        argv += ["--settings", json.dumps(settings), *arguments]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"]
        argv += ["--disable-uvicorn-access-log", "--shutdown-timeout", "2"]
        argv += ["--middleware", "epd_portable.front.http.FrontMiddleware"]
        return [*specs, self._spec("front", "front", argv, self.url, "")]

    def _start(self, plan: Path, variables: Mapping[str, str]) -> Any:
        """Start the launcher of a plan; its standard output is a pipe."""
        with (self.folder / "launcher.log").open("w") as log:
            return nursery().popen(
                *("-m", "tests.forked", "tests.faults.small.launcher", plan),
                stdout=subprocess.PIPE,
                stderr=log,
                env={**variables, **forked.BASE, STATES: str(self.states)},
            )

    def _arguments(self, config: InstanceConfig, role: Role) -> list[str]:
        """Return vLLM's arguments of an engine, as the launcher plans them."""
        arguments: dict[str, Any] = {
            "model": str(MODEL),
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "skip_mm_profiling": True,
            "limit_mm_per_prompt": {"video": 0},
            "ec_transfer_config": {
                **CONNECTOR,
                "ec_role": "ec_producer" if role == "encode" else "ec_consumer",
                "ec_connector_extra_config": config.as_json(),
            },
            **ROLE_ARGS.get(role, {}),
        }
        return render_arguments(arguments)

    def _spec(
        self, name: str, role: str, argv: Sequence[str], url: str, shm_name: str
    ) -> dict[str, Any]:
        return {
            "name": name,
            "role": role,
            "argv": argv,
            "env": {"EPD_INSTANCE": name, "TMPDIR": str(self.temp_dir), **ENGINE_ENV},
            "url": url,
            "ports": {},
            "shm_name": shm_name,
        }

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def wait_for(self, text: str) -> None:
        end_s, seen = time.monotonic() + START_S, []
        while True:
            try:
                seen.append(self._lines.get(timeout=max(0.0, end_s - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no line with {text!r}; there were: {seen}") from None
            assert not seen[-1].startswith("failed"), seen[-1]
            if text in seen[-1]:
                return

    @staticmethod
    def body(pictures: Sequence[Picture]) -> dict[str, Any]:
        """Return the body of a chat request."""
        content = [*(picture.part for picture in pictures), {"type": "text", "text": "?"}]
        return {"model": "small", "messages": [{"role": "user", "content": content}]}

    def ask(self, pictures: Sequence[Picture], timeout_s: float = REQUEST_DEADLINE_S) -> Reply:
        """Send one request and return how it ended.

        Raises:
            AssertionError: It did not end within its deadline.
        """
        begin_s = time.monotonic()
        try:
            answer = httpx.post(
                f"{self.url}/v1/chat/completions",
                json=self.body(pictures),
                timeout=timeout_s,
                trust_env=False,
                verify=NO_TLS,
            )
        except httpx.TimeoutException as error:
            raise AssertionError(f"{pictures} did not end in {timeout_s:g} s") from error
        except httpx.RequestError as error:
            return Reply(0, repr(error), seconds=time.monotonic() - begin_s)
        seconds = time.monotonic() - begin_s
        found = answer.json()
        if answer.status_code != 200:
            return Reply(answer.status_code, found["error"]["message"], seconds=seconds)
        (choice,) = found["choices"]
        if choice["finish_reason"] != "stop":
            # vLLM ends open responses so when its server is stopped.
            return Reply(0, f"ended by {choice['finish_reason']}", seconds=seconds)
        items = (found["ec_transfer_params"] or {}).get("items", ())
        sources = tuple(item["source"] for item in items)
        return Reply(200, choice["message"]["content"], sources, seconds)

    def state(self, name: str, *, reset: bool = False) -> dict[str, int]:
        """Return counts of what an engine keeps; ``reset`` empties its encoder cache before."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect(str(self.states / name))
            connection.sendall(b"reset" if reset else b"-")
            found: dict[str, int] = json.loads(connection.makefile().read())
        return found

    def healthy(self) -> bool:
        """Return whether the front serves and every engine is up."""
        try:
            seen = httpx.get(
                f"{self.url}/health", timeout=5.0, trust_env=False, verify=NO_TLS
            ).json()
        except httpx.RequestError:
            return False
        return not seen["counts"]["down"]

    def recovered(self) -> bool:
        """Return whether every process is healthy, and none is about to end."""
        if not self.healthy():
            return False
        processes = self.census().processes
        return all(
            processes[f"{name}.{part}"] == 1
            for name in self.names
            for part in ("scheduler", "worker")
        )

    def census(self) -> Census:
        """Count the run's processes, descriptors and files."""
        pids = self.faults.folder / "pids"
        return census.take(self.run_id, self.process.pid, pids, self.temp_dir)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}"
            time.sleep(_POLL_S)

    def until_empty(self, left: Callable[[], list[str]]) -> None:
        """Wait until nothing is left; the error says what still is."""
        end_s = time.monotonic() + DEADLINE_S
        while found := left():
            assert time.monotonic() < end_s, f"left after {DEADLINE_S:g} s: {found}"
            time.sleep(_POLL_S)

    def nothing_left(self) -> bool:
        """Return whether no process, port, temporary folder or shared file of the run is left."""
        return (
            not sessions.members([], self.run_id)
            and all(is_free(port) for port in self.ports)
            and not list(sessions.SHM.glob(f"epd-{self.run_id}-*"))
            and not self.temp_dir.exists()
        )

    def close(self) -> None:
        """Stop the run, and check that nothing of it is left and every payload was right."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DEADLINE_S)
        try:
            self.until(self.nothing_left, "everything of the run has gone")
        finally:
            sessions.end_processes([self.process.pid], self.run_id, grace_s=0.0)
            self.process.wait(DEADLINE_S)
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()
