"""Topologies of small engines for all tests that leave them as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.census import Census
from tests.faults.payloads import WITH_DIGESTS
from tests.faults.topology import Topology
from tests.faults.traffic import check, quiet, requests, send

HERE = Path(__file__).parent
SLACK = 8
"""Descriptors that a process may have more: pooled HTTP connections, sockets of writer threads."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests last that share a topology: it probes and watches for as long as it is up."""
    items.sort(
        key=lambda item: HERE in item.path.parents and "served" in getattr(item, "fixturenames", ())
    )


@pytest.fixture(autouse=True)
def digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the senders in this process send digests."""
    for name, value in WITH_DIGESTS.items():
        monkeypatch.setenv(name, value)


class Served:
    """A topology in use, and what it had after its first requests."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        asked = requests("first", 0, 24)
        check(asked, send(topology, asked), failures=False)
        topology.until(lambda: not quiet(topology), "nothing is under way")
        assert topology.payloads.check(), "nothing was delivered"
        self._before: Census = topology.census()

    def check_nothing_is_left(self) -> None:
        """Wait until nothing is under way, and there is no more of anything than at first.

        Every payload up to then was compared with its digest.
        """
        topology = self.topology
        topology.until(topology.recovered, "every process serves")
        topology.until_empty(lambda: quiet(topology))
        topology.until_empty(lambda: topology.census().growth(self._before, slack=SLACK))
        topology.payloads.check()


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
