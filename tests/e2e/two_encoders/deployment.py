"""A front with an encode and a prefill+decode engine, joined by an encode engine elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_portable.config.secret import Secret
from epd_portable.demo import servers
from epd_portable.launch.run.fronts import FrontClient
from tests import warm
from tests.e2e.asking import Answer, ask, assert_close
from tests.e2e.conftest import CONFIG, PYTHONPATH, Pair, Split
from tests.forked import Popen

HOST, OTHER_HOST = "127.0.0.2", "127.0.0.3"
"""Hosts of the front's launcher and of the other one: only 127.0.0.1 counts as this machine."""
JOINED = f"encode-0@{OTHER_HOST}"
ENCODERS = {"encode-0", JOINED}
PD = "prefill_decode-0"
SETTINGS = (
    "instances.encode.engine_args.worker_cls=tests.e2e.workers.SlowEncodeWorker",
    "transfer.path=tcp",
    "transfer.wait_timeout_s=120",
    "transfer.lease_s=60",
)
"""Overrides of both launchers."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The topology next to its reference.

    Attributes:
        secret_file: Of both launchers.
        other: Launcher of the engine that joins.
    """

    pair: Pair
    secret_file: Path
    other: servers.Server

    @property
    def split(self) -> Split:
        return self.pair.split

    def states(self) -> dict[str, str]:
        """Return the state of each engine, as ``epd-launch instances`` shows it."""
        where = ("--front", self.split.url, "--secret-file", str(self.secret_file))
        shown = epd_launch("instances", *where)
        assert shown.returncode == 0, shown.stderr
        columns = [line.split() for line in shown.stdout.splitlines()]
        return {name: state for name, _, state, *_ in columns}

    def problem(self, name: str) -> str:
        """Return what the front shows of a failure between an engine and others."""
        front = FrontClient(self.split.url, Secret.read(str(self.secret_file)))
        return next(
            each["problem"] for each in asyncio.run(front.instances()) if each["name"] == name
        )

    def compare(self, content: Any, answer: Answer, **extra: Any) -> None:
        """Check that a response is close to one process's, with every item from an encoder."""
        assert_close(answer, ask(self.pair.reference_url, content, **extra))
        assert {(item["source"], item["path"]) for item in answer.items} == {("transfer", "tcp")}


def epd_launch(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.nursery().run("-m", "epd_portable.launch.cli", *words, timeout=120)


def other_launcher(split: Split, secret_file: Path, popen: Popen) -> servers.Server:
    """Return the launcher of an encode engine that joins a front."""
    server = servers.topology(
        CONFIG,
        platform="cpu",
        log_dir=split.log_dir / "other",
        settings=[
            *SETTINGS,
            "instances.prefill_decode.count=0",
            f"launch.host={OTHER_HOST}",
            f"secret_file={secret_file}",
            f"launch.join={split.url}",
        ],
        env={
            "EPD_TRACE_DIR": str(split.trace_dir),
            "EPD_TEST_FLAGS": str(split.flags),
            "PYTHONPATH": PYTHONPATH,
        },
    )
    server.popen = popen
    return server
