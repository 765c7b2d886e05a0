"""Fixtures of tests of the front."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Let what a test left show in its own module, where ``__del__`` raises."""
    yield
    gc.collect()
