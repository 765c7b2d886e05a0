"""Starts what is measured or compared: a topology, or plain vLLM as the reference."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from pydantic import JsonValue

from epd_portable.errors import LaunchError
from epd_portable.launch.environment import child_environ
from epd_portable.launch.plan.engine import render_arguments, resolve_model
from epd_portable.launch.plan.machine import has_compiler, port_source
from epd_portable.launch.run import sessions
from epd_portable.launch.run.logs import text_behind
from epd_portable.platforms.traits import TRAITS

_POLL_S = 0.25
_START_TIMEOUT_S = 600.0
_STOP_GRACE_S = 30.0
_TAIL_LINES = 15


def free_port() -> int:
    """Return a port of the loopback address that is free, and no outgoing connection takes."""
    return port_source(secrets.token_hex(4))()


@dataclass(kw_only=True)
class Server:
    """A command that serves HTTP, as a context manager; leaves no process behind.

    Attributes:
        env: Variables beyond those of this process.
        url: Base address, without a final slash.
        log: File for its output.
        ready: Start of the line that reports that it is ready; empty waits for ``/health``.
        report: Called with progress lines while it starts.
        popen: Starts the process, as `subprocess.Popen` does.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    url: str
    log: Path
    ready: str = ""
    report: Callable[[str], None] = lambda line: None
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def __enter__(self) -> Server:
        """Start it and wait until it is ready.

        Raises:
            LaunchError: It ended, or was not ready in time; the message ends with its last lines.
        """
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._process.pid

    def start(self) -> None:
        """Start it, and do not wait."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = self.popen(
                self.argv,
                env=child_environ({**os.environ, **self.env}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> int:
        """Stop it by SIGTERM, kill what does not end, and return its exit status."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        sessions.end_processes([self._process.pid], None, grace_s=_STOP_GRACE_S)
        return self._process.wait()

    def wait_until_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            LaunchError: It ended, or was not ready in time; the message ends with its last lines.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        rest = ""
        with (
            httpx.Client(timeout=2.0, trust_env=False) as client,
            self.log.open(encoding="utf-8", errors="replace") as log,
        ):
            log.seek(self._log_begin)
            while time.monotonic() < deadline_s:
                *lines, rest = (rest + log.read()).split("\n")
                for line in lines:
                    self.report(line)
                if self._process.poll() is not None:
                    raise LaunchError(f"{self.name} ended at start:\n{self._last_lines()}")
                if self.ready:
                    if any(line.startswith(self.ready) for line in lines):
                        return
                elif _healthy(client, self.url):
                    return
                time.sleep(_POLL_S)
        raise LaunchError(
            f"{self.name} was not ready after {_START_TIMEOUT_S:g} s:\n{self._last_lines()}"
        )

    def _last_lines(self) -> str:
        lines = text_behind(self.log, self._log_begin).splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def topology(
    config: Path,
    *,
    platform: str,
    log_dir: Path,
    settings: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Server:
    """Return a topology started by ``epd-launch`` on a free port.

    Args:
        platform: ``cuda``, ``npu`` or ``cpu``.
        log_dir: Folder for the logs of its processes.
        env: Variables beyond those of this process.
    """
    port = free_port()
    argv = [sys.executable, "-m", "epd_portable.launch.cli", "--platform", platform]
    argv += ["--config", str(config), "--port", str(port), "--log-dir", str(log_dir)]
    for setting in settings:
        argv += ["--set", setting]
    return Server(
        name="the topology",
        argv=argv,
        env=env or {},
        url=f"http://127.0.0.1:{port}",
        log=log_dir / "launcher.log",
        ready="ready:",
        report=report,
    )


def one_process(
    model: str,
    *,
    log: Path,
    engine_args: Mapping[str, JsonValue],
    platform: str = "cpu",
    env: Mapping[str, str] | None = None,
    report: Callable[[str], None] = lambda line: None,
    name: str = "reference",
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Server:
    """Return plain vLLM, without this package; `model` and `engine_args` as in a topology file."""
    port, source, traits, env = free_port(), resolve_model(model), TRAITS[platform], env or {}
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", source.argument, "--served-model-name", source.served_name]
    argv += ["--host", "127.0.0.1", "--port", str(port), *render_arguments(engine_args)]
    # Without a compiler it would end in its first sampled request, as a topology's instances would.
    compiles = has_compiler(traits, {**os.environ, **env})
    variables = {
        **({} if compiles else dict(traits.env_without_compiler)),
        "HF_HUB_OFFLINE": "1",
        # Ours lets plain vLLM read images where only a CUDA build of torchvision is available.
        "VLLM_PLUGINS": ",".join(("epd_portable_media_guard", *traits.engine_plugins)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **env,
    }
    stages = re.compile(r"Loading model|Loading weights took|Application startup complete")

    def report_stage(line: str) -> None:
        if stages.search(line):
            report(f"{name}: {line.rpartition('] ')[2]}")

    return Server(
        name=f"the {name}",
        argv=argv,
        env=variables,
        url=f"http://127.0.0.1:{port}",
        log=log,
        report=report_stage,
        popen=popen,
    )
