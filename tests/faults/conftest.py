"""Topologies of small engines for all tests that leave them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.census import Census
from tests.faults.placed import count_placed
from tests.faults.topology import Topology
from tests.faults.traffic import check, quiet, requests, send

HERE = Path(__file__).parent
SLACK = 8
"""Descriptors that a process may have more: pooled HTTP connections, sockets of writer threads."""
MOST_FIRST_REQUESTS = 4
"""Times that requests are sent before what is left of later ones is counted."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests last that share a topology: it probes and watches for as long as it is up."""
    items.sort(
        key=lambda item: HERE in item.path.parents and "served" in getattr(item, "fixturenames", ())
    )


class Served:
    """A topology in use, and what it had after its first requests."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._before = self._after_requests(0)
        # A pair of instances has a group, or a connection, from its first item on.
        for number in range(1, MOST_FIRST_REQUESTS):
            before, self._before = self._before, self._after_requests(number)
            if not self._before.growth(before, slack=SLACK):
                break
        assert count_placed(topology.trace_dir), "nothing was delivered"

    def _after_requests(self, number: int) -> Census:
        """Return what there is after some requests; ``number`` tells them from earlier ones."""
        asked = requests("first", number, 24)
        check(asked, send(self.topology, asked), failures=False)
        self.topology.until(lambda: not quiet(self.topology), "nothing is under way")
        return self.topology.census()

    def check_nothing_is_left(self) -> None:
        """Wait until nothing is under way, and there is no more of anything than at first."""
        topology = self.topology
        topology.until(topology.recovered, "every process serves")
        topology.until_empty(lambda: quiet(topology))
        topology.until_empty(lambda: topology.census().growth(self._before, slack=SLACK))


@contextmanager
def _serving(folder: Path, **paths: Sequence[str]) -> Iterator[Served]:
    topology = Topology(folder / "run", **paths)
    try:
        yield Served(topology)
    finally:
        topology.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two encoders, one by ``shm`` and one by ``tcp``, and two PD instances."""
    folder = tmp_path_factory.mktemp("faults")
    with _serving(folder) as served:
        yield served


@pytest.fixture(scope="module")
def by_collective(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two encoders by ``collective`` and two PD instances: a group for each pair."""
    folder = tmp_path_factory.mktemp("collective")
    with _serving(folder, encoders=("collective",) * 2, prefills=("collective",) * 2) as served:
        yield served


@pytest.fixture
def close() -> Iterator[Callable[[Callable[[], None]], object]]:
    """Name what is closed at the end of a test, the last first."""
    with ExitStack() as closing:
        yield closing.callback
