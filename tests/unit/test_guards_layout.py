"""The two links at the top of the repository, and the one name behind them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["platforms", "runners"])
def test_a_link_at_the_top_points_into_the_package_and_survives_a_clone(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("epd_portable", name)
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["platforms", "runners"])
def test_a_linked_package_refuses_its_second_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"epd_portable.{name}"):
        importlib.import_module(name)
