"""Whole topologies of small engines under the real launcher and the real router."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
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
from epd_portable.config.store import StoreSection
from epd_portable.launch.plan.ports import is_free, port_source
from epd_portable.launch.plan.processes import shm_prefix
from epd_portable.launch.run import sessions
from epd_portable.router.settings import InstanceSettings, RouterSettings
from tests.faults import census
from tests.faults.census import Census
from tests.faults.points import Faults
from tests.faults.small.pictures import Picture
from tests.keyring import secret_file

ROOT = Path(__file__).parents[2]
LEASE_S, WAIT_S = 1.0, 4.0
REQUEST_DEADLINE_S = 5 * WAIT_S
"""Two attempts of at most ``router.idle_timeout_s`` (twice the wait), and what lies between."""
DEADLINE_S = 60.0
START_S = 180.0
"""Of everything at once, torch and all."""
POOL_BYTES = 4 << 20
PRELOADED = ("torch.distributed", "pydantic", "starlette.applications", "uvicorn", "zmq")
"""From a process that has imported these the launcher forks small engines."""
_POLL_S = 0.05
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without certificates: httpx reads all that there are for every request, or takes this."""


@dataclass(frozen=True)
class Reply:
    """How a request ended.

    Attributes:
        status: 0 if the connection broke.
        text: Of the answer, or the error's message.
        sources: How each item was had.
        seconds: How long it took.
    """

    status: int
    text: str
    sources: tuple[str, ...] = ()
    seconds: float = 0.0


class Topology:
    """One run: encoders and PD instances, the router and the launcher.

    Args:
        folder: For logs and traces; made here.
        encoders: The path that each encoder offers.
        prefills: The path that each PD instance offers.
        pool_bytes: Of each.
        lease_s: See `InstanceConfig`.
        wait_s: See `InstanceConfig`.
        env: Variables for every process; small engines then start by themselves.
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
        next_port = port_source(self.run_id)
        self.urls: dict[str, str] = {}
        self.ports: list[int] = []
        specs, backends = [], []
        paths = {f"encode-{index}": path for index, path in enumerate(encoders)}
        paths |= {f"prefill_decode-{index}": path for index, path in enumerate(prefills)}
        for name, path in paths.items():
            receives = name.startswith("prefill")
            http, control, data = next_port(), next_port(), next_port()
            self.ports += [http, control, data] if receives else [http]
            config = InstanceConfig(
                instance=name,
                platform="cpu",
                control_address=f"tcp://127.0.0.1:{control}" if receives else "",
                data_address=f"tcp://127.0.0.1:{data}" if receives else "",
                pool=f"{shm_prefix(self.run_id)}{name}" if receives else "",
                pool_bytes=pool_bytes if receives else 0,
                path=path,
                wait_timeout_s=wait_s,
                lease_s=lease_s,
                secret_file=secret_file(),
                store=store,
            )
            self.urls[name] = f"http://127.0.0.1:{http}"
            role = "prefill-decode" if receives else "encode"
            argv = [sys.executable, "-m", "tests.faults.small.engine"]
            argv += [config.model_dump_json(), str(http)]
            spec = self._spec(name, role, argv, config.pool)
            specs.append(spec if env else {**spec, "preload": PRELOADED})
            backends.append(
                InstanceSettings(
                    name=name,
                    role=role,  # type: ignore[arg-type]
                    url=self.urls[name],
                    control=config.control_address,
                )
            )
        port = next_port()
        self.ports.append(port)
        self.url = self.urls["router"] = f"http://127.0.0.1:{port}"
        settings = RouterSettings(
            port=port,
            model="small",
            instances=tuple(backends),
            secret_file=secret_file(),
            store=store,
            registration=False,
            item_outcomes=True,
            elastic_encode=False,
            # Small engines' pictures are no files of a known format.
            wait_timeout_s=wait_s,
            idle_timeout_s=2 * wait_s,
            probe_interval_s=0.2,
            probe_timeout_s=1.0,
            nack_grace_s=0.2,
        )
        argv = [sys.executable, "-m", "epd_portable.router"]
        argv += ["--settings", settings.model_dump_json()]
        specs.append(self._spec("router", "router", argv, ""))
        self.names = list(self.urls)
        plan = folder / "plan.json"
        plan.write_text(
            json.dumps(
                {
                    "run_id": self.run_id,
                    "processes": specs,
                    "launch": {"stop_grace_s": 2.0},
                    "backoff": {"first_s": 0.05, "max_s": 0.1},
                    "secret": Path(secret_file()).read_text("utf-8").strip(),
                    "log_dir": str(self.log_dir),
                    "temp_dir": str(self.temp_dir),
                }
            )
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.launch.run_plan", str(plan)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                **self.faults.environment,
                "PYTHONPATH": f"{Faults.HOOKS}:{ROOT}",
                "EPD_TRACE_DIR": str(self.trace_dir),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.faults.know("launcher", self.process.pid)
        try:
            self.wait_for("ready:")
        except BaseException:
            self.close()
            raise

    def _spec(self, name: str, role: str, argv: list[str], shm_name: str) -> dict[str, Any]:
        return {
            "name": name,
            "role": role,
            "argv": argv,
            "env": {"EPD_INSTANCE": name},
            "url": self.urls.get(name, self.url if role == "router" else ""),
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
                verify=_NO_TLS,
            )
        except httpx.TimeoutException as error:
            raise AssertionError(f"{pictures} did not end in {timeout_s:g} s") from error
        except httpx.RequestError as error:
            return Reply(0, repr(error), seconds=time.monotonic() - begin_s)
        seconds = time.monotonic() - begin_s
        found = answer.json()
        if answer.status_code != 200:
            return Reply(answer.status_code, found["error"]["message"], seconds=seconds)
        items = (found["ec_transfer_params"] or {}).get("items", ())
        sources = tuple(item["source"] for item in items)
        return Reply(200, found["choices"][0]["message"]["content"], sources, seconds)

    def state(self, name: str, *, reset: bool = False) -> dict[str, int]:
        """Return what an instance keeps; ``reset`` empties its encoder cache before."""
        url = f"{self.urls[name]}/state" + ("?reset" if reset else "")
        answer = httpx.post(url, timeout=DEADLINE_S, trust_env=False, verify=_NO_TLS)
        found: dict[str, int] = answer.json()
        return found

    def healthy(self) -> bool:
        """Whether the router is there and holds every instance for healthy."""
        try:
            seen = httpx.get(
                f"{self.url}/health", timeout=5.0, trust_env=False, verify=_NO_TLS
            ).json()
        except httpx.RequestError:
            return False
        return not seen["counts"]["down"]

    def recovered(self) -> bool:
        """Whether everything is healthy, and nobody is on the way down."""
        if not self.healthy():
            return False
        processes = self.census().processes
        return all(
            processes[f"{name}.{part}"] == 1
            for name in self.names
            if name != "router"
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
        """Whether no process, port, temporary folder or shared file of the run is left."""
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
