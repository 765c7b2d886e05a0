"""An instance as one process of a router tells another of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd_portable.config.roles import Role


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """What one process tells another of an instance.

    Attributes:
        name: From the settings, as `role`, `url`, `control`, `weight` and `labels`.
        row: In the tally.
        registered: See `Instance`, as the rest.
    """

    name: str
    role: Role
    url: str
    control: str
    weight: float
    labels: Mapping[str, str]
    row: int
    registered: bool
    healthy: bool
    is_introduced: bool
    draining: bool
    suspected: bool
    ejected: bool
    reason: str
    problem: str
