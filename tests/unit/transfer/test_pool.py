from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_portable.errors import CapacityError, ConfigError
from epd_portable.transfer.pool import SharedMemory
from tests.receiving import pool_name, shared_memory


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with shared_memory(4096) as made:
        yield made


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 0), (0, 4097), (4096, 1)])
def test_a_range_outside_is_refused(memory: SharedMemory, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        memory.tensor(offset, nbytes)


def test_a_file_made_anew_is_another_pool(memory: SharedMemory) -> None:
    view = memory.tensor(0, 4)
    assert memory.is_current()
    anew = SharedMemory.create(memory.path.name, 4096)
    assert not memory.is_current()
    assert anew.identity != memory.identity
    anew.tensor(0, 4).fill_(7)
    assert view.tolist() == [0, 0, 0, 0]


def test_a_removed_file_is_not_current_and_cannot_be_opened(memory: SharedMemory) -> None:
    memory.unlink()
    memory.unlink()
    assert not memory.is_current()
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(memory.path.name)


def test_pool_larger_than_free_memory_is_an_error_without_a_file() -> None:
    name = pool_name()
    with pytest.raises(CapacityError, match=r"free; lower transfer\.pool_bytes"):
        SharedMemory.create(name, 1 << 55)
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(name)


NO_NAMES = ["", ".", "..", "epd-", "../etc/passwd", "epd-../../tmp/x", "epd-a/b", "epd-a\0b", "x"]


@pytest.mark.parametrize("name", [*NO_NAMES, "epd-" + "a" * 300, "epd-a\n", "\ud800"])
def test_a_name_that_leads_elsewhere_is_no_name_of_a_pool(name: str) -> None:
    """A consumer names the pool, and the producer writes there."""
    for use in (SharedMemory.open, lambda name: SharedMemory.create(name, 4096)):
        with pytest.raises(ValueError, match="no name of a receive pool"):
            use(name)


def test_only_a_private_file_is_a_pool(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = memory.path.name
    assert memory.path.stat().st_mode & 0o777 == 0o600
    memory.path.chmod(0o666)
    with pytest.raises(PermissionError, match="-rw-rw-rw- of user"):
        SharedMemory.open(name)
    memory.path.chmod(0o600)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(PermissionError, match="not a file of user 4711"):
            SharedMemory.open(name)
    assert SharedMemory.open(name).identity == memory.identity


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_pool_that_is_no_regular_file_is_refused(kind: str, memory: SharedMemory) -> None:
    path = memory.path.with_name(f"{memory.path.name}-{kind}")
    if kind == "link":
        path.symlink_to(memory.path)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir()
    try:
        with pytest.raises(OSError):
            SharedMemory.open(path.name)
        if kind == "folder":
            with pytest.raises(ConfigError, match="remove what has that name"):
                SharedMemory.create(path.name, 4096)
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


def test_a_name_taken_late_is_not_used(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.tensor(0, 4).fill_(7)
    with monkeypatch.context() as squatter:
        squatter.setattr(Path, "unlink", lambda path, missing_ok: None)
        with pytest.raises(ConfigError, match="look who put it there"):
            SharedMemory.create(memory.path.name, 8192)
    assert memory.path.stat().st_size == 4096
    assert memory.tensor(0, 4).eq(7).all()
