"""A deployment of two encode instances and one prefill+decode instance, and what it has open."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.e2e.asking import Answer, ask, assert_close
from tests.e2e.conftest import Pair, Split
from tests.e2e.engines import config_of, named

QUEUE = 40
"""Items that an encode instance has at a time: more than other tests send at once."""
OFF_HOST = "127.0.0.2"
ENCODERS = {"encode-0", "encode-1"}
PD = "prefill_decode-0"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The topology beside its reference, and what it had open when it was ready.

    Attributes:
        secret_file: Of the topology.
        opened: See `connections`.
    """

    pair: Pair
    secret_file: Path
    opened: dict[str, set[Any]]

    @property
    def split(self) -> Split:
        return self.pair.split

    def members(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command that shows or changes who takes part."""
        where = ("--router", self.split.url, "--secret-file", str(self.secret_file))
        return epd_launch(*words, *where)

    def states(self) -> dict[str, str]:
        """Return the state of each instance, as ``epd-launch instances`` shows it."""
        shown = self.members("instances")
        assert shown.returncode == 0, shown.stderr
        columns = [line.split() for line in shown.stdout.splitlines()]
        return {name: state for name, _, state, *_ in columns}

    def compare(self, content: Any, answer: Answer) -> None:
        """Check that an answer is close to that of one process, with every item from an encoder."""
        assert_close(answer, ask(self.pair.reference_url, content))
        assert {(item["source"], item["path"]) for item in answer.items} == {("transfer", "tcp")}


def epd_launch(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.nursery().run("-m", "epd_portable.launch.cli", *words, timeout=120)


def connections(split: Split) -> dict[str, set[Any]]:
    """Return the connections of each encoder to the PD instance: own address and remote one."""
    config = config_of(named(split.pid, PD))
    ports = {port_of(config.control_address), port_of(config.data_address)}
    found: dict[str, set[Any]] = {}
    for name in ENCODERS:
        server = named(split.pid, name)
        found[name] = {
            (open_.laddr, open_.raddr)
            for process in (server, *server.children(recursive=True))
            for open_ in process.net_connections("tcp")
            if open_.raddr and open_.raddr.port in ports
        }
    return found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
