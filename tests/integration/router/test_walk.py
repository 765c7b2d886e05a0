"""A picture's way through the router is the one that `docs/structures.md` draws."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import epd_portable
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import streamed, until
from tests.integration.router.test_faults import inside
from tests.integration.router.test_requests import RED, TEXT
from tests.integration.router.test_streams import EVENT, LAST

PACKAGE = Path(epd_portable.__file__).parent
PAGE = PACKAGE.parent / "docs" / "structures.md"
RECORD = ("router/observability/record.py", "router/observability/metrics.py")
NOT_OF_REQUESTS = "router/fleet/health_probes.py"


def drawn(front: str) -> tuple[int, set[str]]:
    """Return how many files the page says of a way, and those that it names."""
    text = PAGE.read_text().partition(f"## A picture's way through the {front}\n")[2]
    text = text.partition("\n## ")[0]
    found = re.search(r"(\d+) files", text)
    assert found
    table = "".join(line for line in text.splitlines() if line.startswith("|"))
    return int(found[1]), set(re.findall(r"`([a-z_/]+\.py)`", table))


class Walk:
    """Notes which files of the package call which, when functions are called."""

    def __init__(self) -> None:
        self.calls: set[tuple[str, str]] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (entered := self._file(frame)):
            return
        caller = frame.f_back
        while caller is not None and not self._file(caller):
            caller = caller.f_back
        self.calls.add((self._file(caller) if caller is not None else "", entered))

    @staticmethod
    def _file(frame: FrameType) -> str:
        path = frame.f_code.co_filename
        inside = path.startswith(f"{PACKAGE}/")
        return path[len(f"{PACKAGE}/") :] if inside else ""


async def test_a_picture_enters_the_files_that_the_page_names_and_none_from_both_sides(
    build: Build,
) -> None:
    behaviour = streamed(EVENT, EVENT, LAST["/v1/chat/completions"])
    t = await build(
        encoders=2, pds=2, behaviour=behaviour, probe_interval_s=60, elastic_encode=True
    )
    await t.until_health(lambda seen: all(each["healthy"] for each in seen.values()))
    # The first one opens connections.
    assert (await t.chat(RED, TEXT, stream=True)).status_code == 200
    await t.until_metric('epd_router_items_total{outcome="encoded"}', 1)
    walk, router = Walk(), inside(t)
    assert router._sweeping is not None
    router._sweeping.cancel()  # It looks after all clients, and is no part of a request.
    sys.setprofile(walk.note)
    try:
        answered = await t.chat(TEXT, RED, stream=True)
        await until(lambda: not (router.in_flight or router.exchange._tasks))
    finally:
        sys.setprofile(None)
    assert answered.content.endswith(LAST["/v1/chat/completions"])
    entered = {file for _, file in walk.calls} - {NOT_OF_REQUESTS}
    count, named = drawn("router")
    assert entered == named and len(named) == count
    both = {pair for pair in walk.calls if pair[0] != pair[1] and pair[::-1] in walk.calls}
    # Who hears of a record reads it.
    assert both <= {RECORD, RECORD[::-1]}
