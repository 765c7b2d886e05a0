"""``epd-launch check``: what can be used on this machine, and why the rest cannot."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from epd_portable.errors import PlatformError
from epd_portable.launch.environment import child_environ
from epd_portable.launch.plan.kv import KV_CONNECTORS
from epd_portable.launch.plan.machine import ENGINES, installed_engines
from epd_portable.launch.plan.processes import columns
from epd_portable.platforms import registry as platforms


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report.

    Attributes:
        kind: ``engine``, ``platform``, ``device``, ``path`` or ``kv``.
        name: A device as ``platform:index``, a path as ``platform/path`` between two of its
            instances, or ``producer→consumer/path`` between platforms.
        reason: State, version or memory; what is missing where it is not usable.
    """

    kind: str
    name: str
    usable: bool
    reason: str


def inspect(platform_names: Sequence[str]) -> list[Finding]:
    """Look at the installed engines, the platforms, their devices and their transfer paths.

    Imports torch where it is installed, and opens each device of a platform that can be used.
    """
    here = installed_engines()
    findings = [
        Finding("engine", each, each in here, here.get(each, "is not installed"))
        for each in ENGINES
    ]
    usable = []
    for name in platform_names:
        state = platforms.availability(name)
        findings.append(Finding("platform", name, state.ok, state.reason))
        if state.ok:
            usable.append(name)
            findings += _platform(name)
    for producer, consumer in itertools.product(usable, repeat=2):
        findings += _paths(producer, consumer)
    return findings


def findings_table(findings: Sequence[Finding]) -> str:
    """Return one line a finding."""
    rows = [
        (finding.kind, finding.name, "yes" if finding.usable else "no", finding.reason)
        for finding in findings
    ]
    return "\n".join(columns([("what", "name", "usable", "why"), *rows]))


def inspect_environment(python: str, platform: str) -> list[Finding]:
    """Return what ``epd-launch check`` of another Python environment finds of a platform."""
    argv = [python, "-m", "epd_portable.launch.cli", "check", "--platform", platform, "--json"]
    try:
        done = subprocess.run(
            argv, env=child_environ(os.environ), capture_output=True, text=True, check=False
        )
        found = [Finding(**each) for each in json.loads(done.stdout)["findings"]]
        return [replace(each, name=f"{each.name} by {python}") for each in found]
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, LookupError):
        reason = (done.stderr.strip() or "it wrote nothing").splitlines()[-1]
    return [Finding("platform", f"{platform} by {python}", False, reason)]


def _platform(name: str) -> Iterator[Finding]:
    """Look at a platform that can be used, and at its devices."""
    platform = platforms.get(name)
    connector = KV_CONNECTORS[platform.traits.kv_connector]
    has_module = importlib.util.find_spec(connector.module) is not None
    reason = f"the module {connector.module} is {'here' if has_module else 'not here'}"
    reason += "; it brings KV from prefill to decode instances of this platform"
    if not has_module:
        reason += f": {connector.install}"
    yield Finding("kv", f"{name}/{connector.name}", has_module, reason)
    for index in range(platform.device_count()):
        try:
            memory = platform.memory_info(index)
            sizes = (
                f"{size / (1 << 30):.2f} GiB" for size in (memory.free_bytes, memory.total_bytes)
            )
            reason, usable = f"{' of '.join(sizes)} are free", True
        except PlatformError as error:
            reason, usable = str(error), False
        yield Finding("device", f"{name}:{index}", usable, reason)


def _paths(producer: str, consumer: str) -> Iterator[Finding]:
    # Loads torch, which is known to be there once a platform is available.
    from epd_portable.transfer import registry as paths

    pair = producer if producer == consumer else f"{producer}→{consumer}"
    for path, usable, reason in paths.describe(producer, consumer):
        yield Finding("path", f"{pair}/{path}", usable, reason)
