"""The processes of a measurement: what is measured has cores of its own, all else is beside it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec
import psutil

import epd_portable
from epd_portable.bench import cpu_time
from epd_portable.bench.router.commands import Cast, Command, Counts, Done, InstanceAddress
from epd_portable.bench.router.questions import MODEL
from epd_portable.bench.servers import Server, free_port
from epd_portable.errors import LaunchError, MeasurementError

LOOPBACK = "127.0.0.1"
OWN_PATH = str(Path(epd_portable.__file__).resolve().parents[1])
PACKAGE = "epd_portable.bench.router"
READY_TIMEOUT_S = 240.0
QUIET_TIMEOUT_S = 60.0

T = TypeVar("T")
SomeProcess = TypeVar("SomeProcess", bound="LineProcess")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Something that is measured.

    Attributes:
        name: In tables.
        kind: ``router``; ``proxy``, the peer; ``direct``, an instance asked without either.
        path: Folder whose package ``epd_portable`` is run; of a router only.
    """

    name: str
    kind: Literal["router", "proxy", "direct"]
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """Who runs where.

    Attributes:
        measured: What is measured.
        beside: Everything else.
        both: So many for what is measured in two processes; with fewer than four cores they are
            those of ``beside`` too.
    """

    measured: frozenset[int]
    beside: frozenset[int]
    both: frozenset[int]

    @classmethod
    def share(cls, cores: Sequence[int]) -> Cores:
        """Share cores out.

        Raises:
            MeasurementError: There is one only.
        """
        if len(cores) < 2:
            raise MeasurementError("one core: what is measured needs one to itself; allow two")
        *beside, last = sorted(cores)
        return cls(
            measured=frozenset({last}),
            beside=frozenset(beside),
            both=frozenset({beside[-1], last}),
        )

    @property
    def rates_of_two(self) -> bool:
        """Whether two processes can be measured without what is beside them."""
        return len(self.beside) >= 3


def pinned(cores: frozenset[int], folder: str) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a `subprocess.Popen` whose process starts on these cores and in this folder.

    In a folder of its own: Python takes modules from where it is started before all others.
    """

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            return subprocess.Popen(argv, cwd=folder, **options)
        finally:
            os.sched_setaffinity(0, before)

    return start


class LineProcess:
    """A process that is told a line and answers with a line, as a context manager.

    Args:
        argv: Modules of this package, after the interpreter.
        cores: Where it runs.
        folder: Where it starts and leaves what it prints as errors.
    """

    def __init__(self, argv: Sequence[str], cores: frozenset[int], folder: Path) -> None:
        self._argv = [sys.executable, "-m", *argv]
        self._start = pinned(cores, str(folder))
        self._log = folder / f"{argv[0]}.log"

    def __enter__(self: SomeProcess) -> SomeProcess:
        """Start it."""
        with self._log.open("ab") as errors:
            self._process = self._start(
                self._argv,
                env={**os.environ, "PYTHONPATH": OWN_PATH},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill it: nothing that it holds is of use to anybody."""
        self.kill()

    def kill(self) -> None:
        """End it in the middle of whatever it does; nothing if that was done."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def tell(self, line: bytes = b"") -> None:
        """Say something; `hear` has the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` says why.
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def hear(self, kind: type[T]) -> T:
        """Return the next answer.

        Raises:
            MeasurementError: The process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").splitlines()[-15:]
            raise MeasurementError("\n".join([f"{self._argv[2]} has ended:", *tail]))
        return msgspec.json.decode(line, type=kind)


class PlayedInstances(LineProcess):
    """Instances that are played by one process.

    Args:
        addresses: Of the instances.
        secret_file: Of the deployment.
        cores: Where it runs.
        folder: Where it starts and leaves what it prints as errors.
        how: Further fields of their `Cast`.
    """

    def __init__(
        self,
        addresses: Sequence[InstanceAddress],
        secret_file: str,
        cores: Cores,
        folder: Path,
        **how: Any,
    ) -> None:
        self.addresses = tuple(addresses)
        cast = Cast(instances=list(addresses), secret_file=secret_file, **how)
        file = folder / f"cast-{uuid.uuid4().hex}.json"
        file.write_bytes(msgspec.json.encode(cast))
        super().__init__([f"{PACKAGE}.instances", str(file)], cores.beside, folder)

    def __enter__(self) -> PlayedInstances:
        """Start it and wait until it listens."""
        super().__enter__()
        self.hear(Counts)
        return self

    def counts(self) -> Counts:
        """Return what it has seen."""
        self.tell()
        return self.hear(Counts)

    def wait_until_quiet(self) -> None:
        """Return when no answer is under way.

        Raises:
            MeasurementError: Some still are after a long time.
        """
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while count := self.counts().open:
            if time.monotonic() > deadline_s:
                raise MeasurementError(f"{count} answers never end at the instances")
            time.sleep(0.1)


class LoadProcess(LineProcess):
    """The clients, in a process of their own.

    Args:
        cores: Where it runs.
        folder: Where it starts and leaves what it prints as errors.
        niceness: How far it stands back for others on its core.
    """

    def __init__(self, cores: Cores, folder: Path, *, niceness: int = 0) -> None:
        super().__init__([f"{PACKAGE}.load", str(niceness)], cores.beside, folder)

    def begin(self, command: Command) -> None:
        """Give a command; `hear` has its end."""
        self.tell(msgspec.json.encode(command))

    def carry_out(self, command: Command) -> Done:
        """Give a command and return what came of it."""
        self.begin(command)
        return self.hear(Done)


def pair(number: int = 0) -> list[InstanceAddress]:
    """Return addresses for an encode and a prefill+decode instance."""
    return [
        InstanceAddress(name=f"encode-{number}", role="encode", host=LOOPBACK, port=free_port()),
        InstanceAddress(
            name=f"prefill-decode-{number}",
            role="prefill-decode",
            host=LOOPBACK,
            port=free_port(),
            control=f"tcp://{LOOPBACK}:{free_port()}",
        ),
    ]


def router(
    side: Side,
    addresses: Sequence[InstanceAddress],
    secret_file: str,
    cores: frozenset[int],
    folder: Path,
    **settings: Any,
) -> Server:
    """Return a router of one side, before these instances.

    Args:
        side: Whose.
        addresses: Of the instances.
        secret_file: Theirs too.
        cores: Where it runs.
        folder: Where it starts and leaves its log.
        settings: Further keys of its settings.
    """
    port = free_port()
    options = {
        "port": port,
        "model": MODEL,
        "secret_file": secret_file,
        "registration": False,
        "instances": [address.settings() for address in addresses],
        **settings,
    }
    file = folder / f"{side.name}-{port}.json"
    file.write_text(json.dumps(options), "utf-8")
    argv = [sys.executable, "-m", "epd_portable.router", "--settings", f"@{file}"]
    return _server(side.name, argv, port, cores, folder, env={"PYTHONPATH": side.path})


def proxy(
    side: Side, addresses: Sequence[InstanceAddress], cores: frozenset[int], folder: Path
) -> Server:
    """Return the peer, before one instance of each role."""
    port = free_port()
    urls = {address.role: f"http://{address.host}:{address.port}" for address in addresses}
    argv = [sys.executable, "-m", f"{PACKAGE}.proxy", "--port", str(port)]
    for role, url in urls.items():
        argv += [f"--{role}", url]
    return _server(side.name, argv, port, cores, folder, env={"PYTHONPATH": OWN_PATH})


def _server(
    name: str,
    argv: Sequence[str],
    port: int,
    cores: frozenset[int],
    folder: Path,
    *,
    env: Mapping[str, str],
) -> Server:
    return Server(
        name=name,
        argv=argv,
        env=env,
        url=f"http://{LOOPBACK}:{port}",
        log=folder / f"{name}-{port}.log",
        startup_timeout_s=READY_TIMEOUT_S,
        popen=pinned(cores, str(folder)),
    )


def port_of(server: Server) -> int:
    """Return where a server listens."""
    return int(server.url.rpartition(":")[2])


def revision(side: Side) -> str:
    """Return which commit a router's folder is at, and whether it was changed; or nothing."""
    asked = ["git", "-C", side.path, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def imported_path(side: Side, folder: Path) -> str:
    """Return the folder from which a side's router takes its package.

    Raises:
        LaunchError: There is no router in it.
    """
    code = "import epd_portable.router as r; print(r.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": side.path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise LaunchError(f"--side {side.name}: no router in {side.path}: {done.stderr.strip()}")
    return str(Path(done.stdout.strip()).resolve().parents[2])


def cpu_s(server: Server) -> float:
    """Return the CPU time that a server's processes have used."""
    return cpu_time.tree_s(server.pid)


def processes_cpu_s(server: Server) -> dict[int, float]:
    """Return the same by process."""
    root = psutil.Process(server.pid)
    return {
        process.pid: cpu_time.own_s(process) for process in [root, *root.children(recursive=True)]
    }


def busy_s(cores: frozenset[int]) -> float:
    """Return for how long cores have worked for anybody, guests' stolen time included."""
    times = psutil.cpu_times(percpu=True)
    return sum(
        sum(each) - each.idle - each.iowait - each.guest - each.guest_nice
        for each in (times[core] for core in cores)
    )


def memory_bytes(server: Server) -> int:
    """Return the resident memory of a server's processes; shared pages count in each."""
    root = psutil.Process(server.pid)
    return sum(int(process.memory_info().rss) for process in [root, *root.children(recursive=True)])


def connections(server: Server) -> tuple[int, int]:
    """Return how many TCP connections a server has: from clients, and all others."""
    root = psutil.Process(server.pid)
    port = port_of(server)
    from_clients = others = 0
    for process in [root, *root.children(recursive=True)]:
        for each in process.net_connections("tcp"):
            if each.status != psutil.CONN_LISTEN:
                from_clients += each.laddr.port == port
                others += each.laddr.port != port
    return from_clients, others
