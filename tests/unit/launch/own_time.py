"""A time of its own for the launcher's work: it goes on to the next timer at once."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, cast


class OwnTime(asyncio.SelectorEventLoop):
    """A loop whose time goes on to the next timer where there is nothing else to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        own = cast(Any, self)
        while own._scheduled and own._scheduled[0]._cancelled:
            heapq.heappop(own._scheduled)._scheduled = False
            own._timer_cancelled_count -= 1
        if not own._ready and own._scheduled:
            self.now = max(self.now, own._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def now() -> float:
    return asyncio.get_running_loop().time()


def in_own_time(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=OwnTime) as runner:
        runner.run(work)
