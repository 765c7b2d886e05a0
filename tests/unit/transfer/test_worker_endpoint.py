from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import CapacityError, TransportError, UnsupportedError
from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform
from epd_portable.transfer import worker_endpoint as module
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.transfer.sessions import new_session
from epd_portable.transfer.worker_endpoint import Publication, WorkerEndpoint, read_publication
from epd_portable.wire.descriptors import PathEndpoint
from tests.receiving import pool_name
from tests.unit.transfer.spies import SharingPlatform


@pytest.fixture
def pool() -> Iterator[str]:
    name = pool_name()
    yield name
    for left in SHM_FOLDER.glob(f"{name}*"):
        left.unlink()


def endpoint(
    pool: str,
    path: str = "collective",
    rank: int = 0,
    platform: Platform | None = None,
    **options: Any,
) -> WorkerEndpoint:
    config = InstanceConfig(
        instance="prefill_decode-0",
        platform="cuda" if platform else "cpu",
        pool=pool,
        pool_bytes=8192,
        path=path,
        **options,
    )
    return WorkerEndpoint(config, DeviceCopies(platform or registry.get("cpu")), rank)


def on_device(
    pool: str, platform: SharingPlatform, rank: int = 0, path: str = "ipc"
) -> WorkerEndpoint:
    """Return a worker whose slots are in device memory."""
    return endpoint(pool, path, rank, platform)


def publish(pool: str, publication: Publication) -> Path:
    file = SHM_FOLDER / f"{pool}.worker"
    file.write_bytes(msgspec.msgpack.encode(publication))
    file.chmod(0o600)
    return file


def test_rank_0_publishes_its_receiving_paths_until_closed(pool: str) -> None:
    worker = endpoint(pool)
    found = read_publication(pool)
    assert [path.path for path in found.paths] == ["collective"]
    assert found.paths[0].address.startswith("127.0.0.1:")
    assert found.slab == ""
    worker.close()
    with pytest.raises(TransportError, match="is not there"):
        read_publication(pool)


@pytest.mark.parametrize(("path", "rank"), [("shm", 0), ("tcp", 0), ("auto", 0), ("collective", 1)])
def test_a_worker_without_receivers_publishes_nothing(pool: str, path: str, rank: int) -> None:
    worker = endpoint(pool, path, rank)
    assert worker.slab_bytes == 0
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []
    worker.close()


def test_endpoint_of_an_ended_worker_is_an_error(pool: str) -> None:
    pid, start, namespace, rest = new_session().split("-")
    ended = "-".join([pid, str(int(start) + 1), namespace, rest])
    publication = Publication(session=ended, slab="", paths=(PathEndpoint(path="ipc"),))
    publish(pool, publication)
    with pytest.raises(TransportError, match=f"{ended}, which has ended"):
        read_publication(pool)


def test_endpoint_file_of_another_user_is_refused(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = Publication(session=new_session(), slab="", paths=(PathEndpoint(path="ipc"),))
    file = publish(pool, publication)
    assert read_publication(pool) == publication
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(TransportError, match="not a file of user 4711"):
            read_publication(pool)
    file.chmod(0o606)
    with pytest.raises(TransportError, match="is -rw----rw- of user"):
        read_publication(pool)
    file.chmod(0o600)
    file.symlink_to(file.rename(file.with_suffix(".elsewhere")))
    with pytest.raises(TransportError, match="look who put it there"):
        read_publication(pool)


def test_a_publication_is_private_and_follows_no_link(pool: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (f"{pool}.worker", f"{pool}.{os.getpid()}"):
        (SHM_FOLDER / name).symlink_to(victim)
    worker = endpoint(pool)
    assert victim.read_text() == "mine"
    assert stat.S_IMODE((SHM_FOLDER / f"{pool}.worker").lstat().st_mode) == 0o600
    worker.close()


def test_a_worker_that_cannot_open_its_paths_leaves_nothing(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TransportError, match=r"cannot receive on 256\.0\.0\.1"):
        endpoint(pool, host="256.0.0.1", trusted_network=True)

    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CapacityError, match=r"worker cannot be written: .*; enlarge /dev/shm"):
        endpoint(pool)
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []


def test_later_rank_opens_the_slab_of_rank_0_at_its_start(pool: str) -> None:
    platform = SharingPlatform()
    first = on_device(pool, platform)
    second = on_device(pool, platform, rank=1)
    assert platform.opened == 1
    first.slab.tensor(64, 4).fill_(9)
    assert second.slab.tensor(64, 4).eq(9).all()
    assert platform.opened == 1
    assert (first.slab_bytes, second.slab_bytes) == (8192, 0)


def test_later_rank_waits_at_its_start_for_rank_0(pool: str) -> None:
    platform = SharingPlatform()
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(on_device, pool, platform, 1)
        first = on_device(pool, platform)
        second.result(20).slab.tensor(64, 4).fill_(9)
    assert first.slab.tensor(64, 4).eq(9).all()


def test_a_start_without_rank_0_s_slab_ends(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SharingPlatform()
    monkeypatch.setattr(module, "_RANK_0_TIMEOUT_S", 0.0)
    with pytest.raises(TransportError, match="is not there"):
        on_device(pool, platform, rank=1)
    first = on_device(pool, platform)
    platform.problem = UnsupportedError("its device is not visible here")
    with pytest.raises(UnsupportedError, match="not visible"):
        on_device(pool, platform, rank=1)
    first.close()


def test_paths_of_unshared_memory_are_not_offered(
    pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    platform = SharingPlatform()
    platform.refuses_to_share = True
    first = on_device(pool, platform, path="auto")
    assert "not offered: ipc, collective: memory in expandable segments" in caplog.text
    found = read_publication(pool)
    assert (found.slab, found.paths) == ("", ())
    second = on_device(pool, platform, rank=1, path="auto")
    for worker in (first, second):
        assert worker.slab_bytes == 0
        with pytest.raises(TransportError, match="no device memory for items"):
            assert worker.slab


def test_unshareable_memory_ends_a_start_with_its_path(pool: str) -> None:
    platform = SharingPlatform()
    platform.refuses_to_share = True
    with pytest.raises(UnsupportedError, match="cannot be shared"):
        on_device(pool, platform, path="ipc")
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []
