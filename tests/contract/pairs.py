"""Pairs of platforms whose transfers can be tested here, and the paths between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from epd_portable.platforms import registry
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer import registry as paths
from epd_portable.transfer.copies import Clock, DeviceCopies
from epd_portable.transfer.paths.base import PathWriter
from epd_portable.transfer.sessions import host_identity, new_session
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor
from tests.keyring import keys

FINGERPRINT = "same"
PLATFORMS = [name for name in registry.TRAITS if registry.availability(name).ok]
PATHS = [entry.name for entry in paths.PATHS if not paths.missing(entry)]


@dataclass(frozen=True)
class Pair:
    """Platforms on which an encode instance and a PD instance compute."""

    encode: str
    prefill: str

    @property
    def prefill_index(self) -> int:
        """The PD instance's device: the second one where there are two, the other end's first."""
        return min(1, registry.get(self.prefill).device_count() - 1)

    def refusal(self, path: str) -> str:
        """Return the registry's reason against a path; empty if the pair can take it."""
        can = paths.entry(path)
        hosts = [each for each in (self.encode, self.prefill) if not TRAITS[each].needs_device_copy]
        if can.devices_only and hosts:
            return f"{path}: {hosts[0]} has no device memory"
        if can.device_memory and self.encode != self.prefill:
            return f"{path}: encode-0 is on {self.encode}, prefill_decode-0 on {self.prefill}"
        return ""


@dataclass(frozen=True)
class Route:
    """A path between the two ends of a pair."""

    path: str
    pair: Pair

    def __str__(self) -> str:
        return f"{self.path}-{self.pair.encode}-to-{self.pair.prefill}"

    def encode_copies(self, clock: Clock | None = None) -> DeviceCopies:
        """The producer's device, which becomes this thread's current one."""
        platform = registry.get(self.pair.encode)
        platform.set_device(0)
        return DeviceCopies(platform, 0) if clock is None else DeviceCopies(platform, 0, clock)

    def writer(self, clock: Clock | None = None) -> PathWriter:
        return paths.load_writer(self.path, self.encode_copies(clock), keys())

    @property
    def has_devices(self) -> bool:
        """Return whether the ends have a device each where the path's library refuses to share."""
        one_each = self.path == "collective" and TRAITS[self.pair.encode].one_rank_a_device
        return not one_each or self.pair.prefill_index > 0

    @property
    def fenced(self) -> bool:
        return paths.entry(self.path).fenced

    @property
    def needs_nobody(self) -> bool:
        """Return whether a write to a pool succeeds whose owner was killed, without a reader."""
        entry = paths.entry(self.path)
        return not entry.receiver and not entry.device_memory

    @property
    def in_one_piece(self) -> bool:
        """Return whether a write looks at the clock only before and after it."""
        return paths.queues_copies(self.path, self.pair.encode) or self.path == "nixl"

    @property
    def queues(self) -> bool:
        """Return whether the producer's device makes the whole write on its own."""
        passes_host = not paths.entry(self.path).device_memory
        blocks = passes_host and TRAITS[self.pair.encode].foreign_pages_block
        return paths.queues_copies(self.path, self.pair.encode) and not blocks

    @property
    def in_device_memory(self) -> bool:
        return paths.in_device_memory(self.path, self.pair.prefill)


def encode_peer(platform: str, names: list[str]) -> PeerDescriptor:
    """Describe an encode instance, as it does itself."""
    return PeerDescriptor(
        instance="encode-0",
        session=new_session(),
        host=host_identity(),
        device=f"{platform}:0",
        fingerprint=FINGERPRINT,
        paths=tuple(PathEndpoint(path=name) for name in names),
    )


def parameters(routes: Iterable[Route], *, mixed_in_full: bool = False) -> list[Any]:
    """Return routes as parameters of a test, each marked with the devices that it needs.

    Args:
        routes: Routes of the test.
        mixed_in_full: Whether routes between two platforms run with ``--full`` only. The same code
            runs at each of their ends as on a route within one platform.
    """
    found = []
    for route in routes:
        ends = {route.pair.encode, route.pair.prefill}
        marks = [getattr(pytest.mark, f"needs_{name}") for name in sorted(ends & {"cuda", "npu"})]
        marks += [pytest.mark.full] * (mixed_in_full and len(ends) > 1)
        found.append(pytest.param(route, id=str(route), marks=marks))
    return found


EACH_PLATFORM: list[Any] = [
    "cpu",
    pytest.param("npu", marks=pytest.mark.needs_npu),
    pytest.param("cuda", marks=pytest.mark.needs_cuda),
]
"""Parameters of a test that runs on every platform."""
PAIRS = [Pair(*names) for names in product(PLATFORMS, PLATFORMS)]
EVERY_ROUTE = [Route(path, pair) for pair in PAIRS for path in PATHS]
ROUTES = [
    route for route in EVERY_ROUTE if not route.pair.refusal(route.path) and route.has_devices
]
REFUSED = [route for route in EVERY_ROUTE if route.pair.refusal(route.path)]


def turn(route: Route, values: Sequence[Any], nth: int, count: int) -> Any:
    """The nth of some values of a route: all values for some route, and not each for each."""
    return values[(ROUTES.index(route) * count + nth) % len(values)]
