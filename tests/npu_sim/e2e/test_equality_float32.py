"""By `shm` and `tcp` between two simulated devices, in float32, the answers are those of vLLM-CPU.

`test_store` shows `ipc` and `collective`. Small engines and transfers alone show all without
``--full``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair
from tests.e2e.equality import FloatSmoke
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import simulated

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["shm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    path: str,
    npu_fork: Popen,
    tmp_path_factory: pytest.TempPathFactory,
    reference_url: str,
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(path)
    with simulated(folder, [f"transfer.path={path}"], popen=npu_fork) as split:
        yield Pair(split=split, reference_url=reference_url)


class TestOnSimulatedDevices(FloatSmoke):
    """Encode on device 0, prefill and decode on device 1."""

    def test_items_travel_by_the_path_that_was_asked_for(self, pair: Pair, path: str) -> None:
        answer = ask(pair.split.url, [picture(40), picture(41), ASK])
        assert [item["path"] for item in answer.items] == [path, path]
