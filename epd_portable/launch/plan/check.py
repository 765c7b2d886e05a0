"""``epd-launch check``: what can be used on this machine, and why the rest cannot."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epd_portable.config.store import StoreSection
from epd_portable.connector.stores.base import make_store
from epd_portable.errors import ConfigError, PlatformError, StoreError
from epd_portable.launch.plan.hardware import Hardware
from epd_portable.launch.plan.installed import ENGINES, installed_engines
from epd_portable.launch.plan.kv import KV_CONNECTORS
from epd_portable.launch.plan.machine import allowed_cores, has_shares, memory_nodes, quota_cores
from epd_portable.platforms import registry as platforms
from epd_portable.platforms.base import LimitsCompute

MEMORY_TOLERANCE = 0.1
"""Part by which memory may differ from a profile, because drivers reserve some of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: ``engine``, ``cores``, ``platform``, ``share``, ``hardware``, ``device``, ``path``,
            ``kv``, ``store`` or ``plan``.
        name: A device as ``platform:index``, a path as ``platform/path`` between two of its
            instances, or ``producer→consumer/path`` between platforms.
        reason: What was found, or what is missing.
    """

    kind: str
    name: str
    usable: bool
    reason: str


def inspect(platform_names: Sequence[str], expected: Hardware | None = None) -> list[Finding]:
    """Look at the installed engines, the platforms, their devices and their transfer paths.

    Imports torch where it is installed, and opens each device of a platform that can be used. With
    ``expected``, devices are compared with those of a profile.
    """
    return [*_engines(), _cores(), *_platforms(platform_names, expected)]


def plan_finding(name: str, warnings: Sequence[str]) -> Finding:
    """Say whether what a topology file asks for goes well here, by the warnings of its plan."""
    reason = "; ".join(warnings) or "nothing asks for more than there is"
    return Finding(kind="plan", name=name, usable=not warnings, reason=reason)


def store_finding(section: StoreSection) -> Finding:
    """Say whether a store answers."""
    name = section.where
    try:
        store = make_store(section)
        try:
            return Finding(kind="store", name=name, usable=True, reason=store.check())
        finally:
            store.close()
    except (ConfigError, StoreError) as error:
        return Finding(kind="store", name=name, usable=False, reason=str(error))


def _cores() -> Finding:
    cores, quota = len(allowed_cores()), quota_cores()
    reason = f"{cores} cores on {len(memory_nodes()) or 1} memory node(s)"
    if quota is not None and quota < cores:
        reason += f", and the time of {quota:g} of them by the container's limit"
    return Finding(kind="cores", name="cpu", usable=quota is None or quota >= cores, reason=reason)


def _engines() -> Iterator[Finding]:
    here = installed_engines()
    for name in ENGINES:
        version = here.get(name)
        reason = version or "is not installed"
        yield Finding(kind="engine", name=name, usable=version is not None, reason=reason)


def _platforms(names: Sequence[str], expected: Hardware | None) -> Iterator[Finding]:
    usable: list[str] = []
    for name in names:
        state = platforms.availability(name)
        yield Finding(kind="platform", name=name, usable=state.ok, reason=state.reason)
        if not state.ok:
            continue
        if share := _share(name):
            yield share
        yield _kv(name)
        sizes: list[int] = []
        yield from _devices(name, sizes)
        if expected:
            yield compare(expected, sizes)
        usable.append(name)
    for producer, consumer in itertools.product(usable, repeat=2):
        yield from _paths(producer, consumer)


def _share(name: str) -> Finding | None:
    """Say whether instances can be limited to a part of a device's compute."""
    platform = platforms.get(name)
    traits = platform.traits
    if traits.share_env is None:
        return None
    found = f"by {traits.share_by} ({traits.share_env}; not run on hardware)"
    if not has_shares(traits, os.environ):
        reason = f"the service does not run, so instances take turns; {found}"
        return Finding(kind="share", name=name, usable=False, reason=reason)
    try:
        units = platform.compute_units(0) if isinstance(platform, LimitsCompute) else {}
    except PlatformError as error:
        return Finding(kind="share", name=name, usable=False, reason=str(error))
    whole = ", ".join(f"{count} {unit}" for unit, count in units.items())
    reason = f"{found}, of {whole}" if whole else f"the service runs; {found}"
    return Finding(kind="share", name=name, usable=True, reason=reason)


def _kv(name: str) -> Finding:
    """Say whether prefill and decode can be instances of their own."""
    connector = KV_CONNECTORS[platforms.get(name).traits.kv_connector]
    usable = importlib.util.find_spec(connector.module) is not None
    found = f"the module {connector.module} is " + ("here" if usable else "not here")
    reason = f"{found}; it brings KV from prefill to decode instances of this platform"
    if not usable:
        reason += f": {connector.install}"
    return Finding(kind="kv", name=f"{name}/{connector.name}", usable=usable, reason=reason)


def _devices(name: str, sizes: list[int]) -> Iterator[Finding]:
    """Look at each device, and put the memory of those that answer into ``sizes``."""
    platform = platforms.get(name)
    count = platform.device_count()
    for index in range(count):
        device = f"{name}:{index}"
        try:
            memory = platform.memory_info(index)
        except PlatformError as error:
            yield Finding(kind="device", name=device, usable=False, reason=str(error))
            continue
        sizes.append(memory.total_bytes)
        reason = f"{_gib(memory.free_bytes)} of {_gib(memory.total_bytes)} are free"
        peers = [peer for peer in range(count) if peer != index]
        if reached := [peer for peer in peers if platform.can_access_peer(index, peer)]:
            reason += f"; reaches {', '.join(f'{name}:{peer}' for peer in reached)}"
        yield Finding(kind="device", name=device, usable=True, reason=reason)


def compare(expected: Hardware, sizes: Sequence[int]) -> Finding:
    """Say whether devices of these sizes, in bytes, are those of a profile."""
    profile = expected.profile
    wanted = profile.usable_memory_bytes
    differing = [size for size in sizes if abs(size - wanted) > MEMORY_TOLERANCE * wanted]
    problems = []
    if len(sizes) != profile.devices_per_node.value:
        problems.append(f"{len(sizes)} devices answer, {profile.devices_per_node.value} expected")
    if differing:
        problems.append(f"torch sees {_gib(differing[0])} of a device, {_gib(wanted)} expected")
    return Finding(
        kind="hardware",
        name=expected.name,
        usable=not problems,
        reason="; ".join(problems) or f"{len(sizes)} devices with {_gib(wanted)} each, as expected",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _paths(producer: str, consumer: str) -> Iterator[Finding]:
    # Loads torch, which is known to be there once a platform is available.
    from epd_portable.connector import registry as paths

    pair = producer if producer == consumer else f"{producer}→{consumer}"
    for path, usable, reason in paths.describe(producer, consumer):
        yield Finding(kind="path", name=f"{pair}/{path}", usable=usable, reason=reason)
