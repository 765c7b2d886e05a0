from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from epd_portable.bench.serve import start


class Sides:
    """Two servers that are up for as long as their contexts; notes who starts beside whom."""

    def __init__(self, *, meet: bool) -> None:
        self.starting: set[str] = set()
        self.seen: dict[str, set[str]] = {}
        self.ended: list[str] = []
        self._both = threading.Barrier(2 if meet else 1)

    @contextmanager
    def side(self, name: str) -> Iterator[Any]:
        self.starting.add(name)
        self._both.wait(20)
        self.seen[name] = set(self.starting)
        self._both.wait(20)
        self.starting.discard(name)
        yield name
        self.ended.append(name)

    def all(self) -> dict[str, AbstractContextManager[Any]]:
        return {name: self.side(name) for name in ("split", "one process")}


@pytest.mark.parametrize("together", [True, False])
def test_sides_start_at_once_only_where_they_share_no_device(together: bool) -> None:
    sides = Sides(meet=together)
    with ExitStack() as stack:
        running: dict[str, Any] = start(sides.all(), stack, together=together)
        assert running == {"split": "split", "one process": "one process"}
        assert sides.ended == []
    assert sorted(sides.ended) == ["one process", "split"]
    beside = {"split", "one process"}
    assert sides.seen == (
        {name: beside for name in beside} if together else {name: {name} for name in beside}
    )
