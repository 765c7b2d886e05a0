from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_portable.transfer.pool import SHM_FOLDER
from tests.contract.pairs import ROUTES, Route, parameters
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
