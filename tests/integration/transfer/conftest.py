from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_portable.transfer.control import ControlClients, ControlServer
from epd_portable.transfer.pool import SHM_FOLDER
from tests.contract.pairs import ROUTES, Route, parameters
from tests.keyring import keys
from tests.kit.encode_side import CountedSender, make_sender
from tests.kit.ends import EncodeSide, PrefillSide


@pytest.fixture(scope="module", params=parameters(ROUTES, mixed_in_full=True))
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.fixture(scope="module")
def path(route: Route) -> str:
    return route.path


@pytest.fixture
def make_pd(route: Route, tmp_path: Path) -> Iterator[Callable[..., PrefillSide]]:
    made: list[PrefillSide] = []

    def make(**options: float) -> PrefillSide:
        made.append(PrefillSide(route, tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pd in made:
        pd.close()
        assert not (SHM_FOLDER / pd.pool).exists()


@pytest.fixture
def encode(route: Route) -> Iterator[EncodeSide]:
    side = EncodeSide(route.path, route.pair.encode)
    yield side
    side.close()


@pytest.fixture
def sender() -> Iterator[CountedSender]:
    made = make_sender("shm")
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer("tcp://127.0.0.1:*", "server", keys())
    yield made
    made.close()


@pytest.fixture
def clients() -> Iterator[ControlClients]:
    made = ControlClients("client", keys())
    yield made
    made.close()
