from __future__ import annotations

import pytest

from tests.unit.items.harness import Pair


@pytest.fixture
def pair() -> Pair:
    return Pair()
