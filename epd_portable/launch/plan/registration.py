"""What is told to the process that registers instances at the router of another host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrarSettings:
    """What the launcher tells `epd_portable.launch.run.registrar`.

    Attributes:
        router: Base address of the router.
        secret_file: Of the deployment.
        port: On the loopback address, for ``/health``.
        instances: What the router is told of each: ``name``, ``role``, ``url``, ``control``,
            ``weight`` and ``labels``.
        join_timeout_s: Longest time that the router may take to warm an instance up.
        leave_timeout_s: Longest wait for what an instance works on when it leaves.
    """

    router: str
    secret_file: str
    port: int
    instances: tuple[Mapping[str, Any], ...]
    join_timeout_s: float
    leave_timeout_s: float

    def as_json(self) -> str:
        """Return the argument ``--settings``."""
        return json.dumps(asdict(self))
