"""``epd-launch check``: what can be used on this machine, and why the rest cannot."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epd_portable.config.hardware import HardwareProfile
from epd_portable.errors import PlatformError
from epd_portable.launch.plan.installed import ENGINES, installed_engines
from epd_portable.launch.plan.kv import KV_CONNECTORS
from epd_portable.platforms import registry as platforms

MEMORY_TOLERANCE = 0.1
"""Part by which memory may differ from a profile, because drivers reserve some of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: ``engine``, ``platform``, ``hardware``, ``device``, ``path`` or ``kv``.
        name: A device as ``platform:index``, a path as ``platform/path`` between two of its
            instances, or ``producer→consumer/path`` between platforms.
        reason: What was found, or what is missing.
    """

    kind: str
    name: str
    usable: bool
    reason: str


def inspect(
    platform_names: Sequence[str], expected: HardwareProfile | None = None
) -> list[Finding]:
    """Look at the installed engines, the platforms, their devices and their transfer paths.

    Imports torch where it is installed, and opens each device of a platform that can be used. With
    ``expected``, devices are compared with those of a profile.
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
            findings += _platform(name, expected)
    for producer, consumer in itertools.product(usable, repeat=2):
        findings += _paths(producer, consumer)
    return findings


def _platform(name: str, expected: HardwareProfile | None) -> Iterator[Finding]:
    """Look at a platform that can be used, and at its devices."""
    platform = platforms.get(name)
    connector = KV_CONNECTORS[platform.traits.kv_connector]
    has_module = importlib.util.find_spec(connector.module) is not None
    reason = f"the module {connector.module} is {'here' if has_module else 'not here'}"
    reason += "; it brings KV from prefill to decode instances of this platform"
    if not has_module:
        reason += f": {connector.install}"
    yield Finding("kv", f"{name}/{connector.name}", has_module, reason)
    sizes: list[int] = []
    for index in range(platform.device_count()):
        try:
            memory = platform.memory_info(index)
        except PlatformError as error:
            yield Finding("device", f"{name}:{index}", False, str(error))
            continue
        sizes.append(memory.total_bytes)
        reason = f"{_gib(memory.free_bytes)} of {_gib(memory.total_bytes)} are free"
        yield Finding("device", f"{name}:{index}", True, reason)
    if expected:
        yield compare(expected, sizes)


def compare(expected: HardwareProfile, sizes: Sequence[int]) -> Finding:
    """Say whether devices of these sizes, in bytes, are those of a profile."""
    count, wanted = expected.devices_per_node, expected.usable_memory_bytes
    differing = [size for size in sizes if abs(size - wanted) > MEMORY_TOLERANCE * wanted]
    problems = []
    if len(sizes) != count:
        problems.append(f"{len(sizes)} devices answer, {count} expected")
    if differing:
        problems.append(f"torch sees {_gib(differing[0])} of a device, {_gib(wanted)} expected")
    fits = f"{len(sizes)} devices with {_gib(wanted)} each, as expected"
    return Finding("hardware", expected.name, not problems, "; ".join(problems) or fits)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _paths(producer: str, consumer: str) -> Iterator[Finding]:
    # Loads torch, which is known to be there once a platform is available.
    from epd_portable.transfer import registry as paths

    pair = producer if producer == consumer else f"{producer}→{consumer}"
    for path, usable, reason in paths.describe(producer, consumer):
        yield Finding("path", f"{pair}/{path}", usable, reason)
