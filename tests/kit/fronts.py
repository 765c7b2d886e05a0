"""A front of real engines: its health, its load, and the death of one of its processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from tests.e2e.engines import RESTART_S, counted, process, wait_until

if TYPE_CHECKING:
    from tests.e2e.conftest import Split


@contextmanager
def killed(front: Split, name: str) -> Iterator[None]:
    """Kill a process, and wait at the end until the launcher's new one is up."""
    old = process(front.pid, name)
    old.send_signal(signal.SIGKILL)
    old.wait(60)
    yield
    wait_until(lambda: is_up(front, name), f"{name} is back", within_s=RESTART_S)


def is_up(front: Split, name: str) -> bool:
    path = "/health" if name == "front" else f"/epd/instances/{name}/health"
    try:
        return httpx.get(front.url + path, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def in_flight(front: Split) -> float:
    return counted(front.url, "epd_front_instance_in_flight")
