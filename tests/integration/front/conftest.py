"""Fixtures of tests of the front."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.front.played_front import Make


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Let what a test left show in its own module, where ``__del__`` raises."""
    yield
    gc.collect()


@pytest.fixture
def make(config: Any, tmp_path: Path) -> Make:
    """Return what makes a front of engines with these names."""
    from tests.integration.front.played_front import Front

    return partial(Front, config, tmp_path)
