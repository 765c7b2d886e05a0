from __future__ import annotations

import pytest

from tests.unit.runners.harness import Pair, PrefillSide


@pytest.fixture(params=["sync", "async"])
def either_preallocation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `PrefillSide` have either preallocator where a test names none."""
    monkeypatch.setattr(PrefillSide, "preallocation", request.param)


@pytest.fixture
def pair() -> Pair:
    return Pair()
