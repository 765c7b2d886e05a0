from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_portable.errors import ConfigError, PlatformUnavailableError
from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from tests.kit.commands import python


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, PlatformTraits]]:
    """A table of its own for one test, with no platform loaded yet."""
    table = dict(TRAITS)
    monkeypatch.setattr(registry, "TRAITS", table)
    registry._load.cache_clear()
    yield table
    registry._load.cache_clear()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown platform 'tpu'; choose one of cuda, npu, cpu"):
        registry.get("tpu")


def test_an_unusable_platform_says_why(table: dict[str, PlatformTraits]) -> None:
    absent = "epd_portable.platforms.absent:AbsentPlatform"
    table["cuda"] = dataclasses.replace(table["cuda"], implementation=absent)
    with pytest.raises(PlatformUnavailableError, match="platform 'cuda': its module cannot be"):
        registry.get("cuda")


def test_broken_torch_is_reported_and_imported_once(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n"
        "if os.environ.get('TRIED'): raise RuntimeError('imported twice')\n"
        "os.environ['TRIED'] = '1'\n"
        "raise RuntimeError('Failed to load the backend extension') from "
        "ImportError('libhccl.so: cannot open shared object file')\n"
    )
    code = (
        "from epd_portable.platforms import registry\n"
        "print({registry.availability(name).reason for name in registry.TRAITS})"
    )
    result = python(code, PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == str(
        {
            "torch cannot be imported: Failed to load the backend extension: "
            "libhccl.so: cannot open shared object file"
        }
    ), result.stderr


@pytest.mark.parametrize("name", list(TRAITS))
def test_alignments_are_powers_of_two_that_a_cache_line_divides(name: str) -> None:
    for nbytes in (TRAITS[name].slot_alignment_bytes, TRAITS[name].slab_alignment_bytes):
        assert nbytes % 64 == 0
        assert nbytes & (nbytes - 1) == 0


def test_the_contract_has_at_most_fifteen_methods() -> None:
    methods = [
        name
        for name, member in inspect.getmembers(Platform, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert len(methods) <= 15, methods
