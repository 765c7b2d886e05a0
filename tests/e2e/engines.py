"""Looks at the engine processes of a running topology from outside."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import psutil

from epd_portable.config.instance import InstanceConfig
from tests.metrics_page import total

DEADLINE_S = 90.0
_COUNTED = {"ec_producer": "epd_encode_", "ec_consumer": "epd_pd_"}
RESTART_S = 400.0
"""Seconds for the restart of an engine, on a machine that is busy."""


def instance(launcher: int, ec_role: str) -> psutil.Process:
    """Return the engine with this role."""
    return _child(launcher, f'"ec_role": "{ec_role}"')


def named(launcher: int, name: str) -> psutil.Process:
    """Return the engine with this name."""
    return _child(launcher, f'"instance": "{name}"')


def process(launcher: int, name: str) -> psutil.Process:
    """Return a process of a topology, by its name in the plan."""
    found = _by_name(launcher)
    assert name in found, f"{name} does not run"
    return found[name]


def names(launcher: int) -> list[str]:
    """Return the names of the processes of a topology."""
    return [*_by_name(launcher)]


def _by_name(launcher: int) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # One that ends at this moment.
            if name := child.environ().get("EPD_INSTANCE"):
                found[name] = child
    return found


def rests(server: psutil.Process) -> bool:
    """Tell whether every thread of an instance waits for something."""
    pids = [each.pid for each in (server, *server.children(recursive=True))]
    stats = [path.read_text() for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return not any(stat.rpartition(")")[2].split()[0] == "R" for stat in stats)


def config_of(server: psutil.Process) -> InstanceConfig:
    """Return what the connector of an instance was told."""
    told = json.loads(_option(server, "--ec-transfer-config"))
    return InstanceConfig.parse(told["ec_connector_extra_config"])


def counted(url: str, series: str) -> float:
    """Return a metric of a front, summed over its series with these labels."""
    page = httpx.get(f"{url}/metrics", timeout=30, trust_env=False)
    assert page.status_code == 200, page.text
    return total(page.text, series)


def exposition(launcher: int, ec_role: str) -> list[str]:
    """Return the lines of the front's metrics page that are about an engine."""
    front = process(launcher, "front")
    url = f"http://{_option(front, '--host')}:{_option(front, '--port')}"
    page = httpx.get(f"{url}/metrics", timeout=30, trust_env=False)
    told = json.loads(_option(front, "--settings"))["engines"]
    names = [each["name"] for each in told]
    own = names.index(config_of(instance(launcher, ec_role)).instance)
    others = {str(n) for n in range(len(names))} - {str(own)}
    # vLLM's own series have the number of their engine.
    away = re.compile(rf'[{{,]engine="({"|".join(sorted(others))})"')
    return [line for line in page.text.splitlines() if not others or not away.search(line)]


def metric(launcher: int, ec_role: str, name: str) -> float:
    """Return a metric of an engine, summed over its labels."""
    beginnings = (f"{name}{{", f"{name} ")
    lines = [line for line in exposition(launcher, ec_role) if line.startswith(beginnings)]
    assert lines, f"no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def counts(launcher: int, ec_role: str) -> Counter[str]:
    """Return what this package counts in an engine: every counter by name and label.

    But for those of a store, which is written some time later.
    """
    samples = (line.rpartition(" ") for line in exposition(launcher, ec_role))
    return Counter(
        {
            name: int(float(value))
            for name, _, value in samples
            if name.startswith(_COUNTED[ec_role]) and "_total" in name and "_store_" not in name
        }
    )


def cpu_s(server: psutil.Process) -> float:
    """Return the CPU time that an instance's processes have taken, in seconds."""
    times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def wait_until(condition: Callable[[], bool], what: str, *, within_s: float = DEADLINE_S) -> None:
    """Poll a condition until it holds.

    Raises:
        AssertionError: It did not in time.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


def shared_memory_of(pid: int) -> set[Path]:
    """Return the files of ``/dev/shm`` that a process and its children map; none if it has gone."""
    try:
        first = psutil.Process(pid)
        return shared_memory([first, *first.children(recursive=True)])
    except psutil.NoSuchProcess:
        return set()


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of ``/dev/shm`` that processes map."""
    mapped = (Path(each.path) for process in processes for each in process.memory_maps())
    return {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}


def _child(launcher: int, words: str) -> psutil.Process:
    for child in psutil.Process(launcher).children():
        # One that was killed stays for a moment, and has no command line.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(words in word for word in child.cmdline()):
                return child
    raise AssertionError(f"no instance with {words}")


def _option(server: psutil.Process, name: str) -> str:
    command = server.cmdline()
    return command[command.index(name) + 1]
