"""Fixtures of transfers between two simulated devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.pairs import Route
from tests.kit.ends import PrefillSide


@pytest.fixture
def pd(route: Route, tmp_path: Path) -> Iterator[PrefillSide]:
    """A PD instance without an engine, in this process; the module says by which route."""
    made = PrefillSide(route, tmp_path)
    yield made
    made.close()
