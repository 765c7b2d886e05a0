from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.connector.control import new_session
from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.pool import SHM_FOLDER, SharedMemory
from epd_portable.connector.worker_endpoint import Publication, WorkerEndpoint, read_publication
from epd_portable.errors import TransportError
from epd_portable.platforms import registry
from epd_portable.wire.descriptors import PathEndpoint


@pytest.fixture
def pool() -> Iterator[str]:
    name = f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    yield name
    for left in SHM_FOLDER.glob(f"{name}*"):
        left.unlink()


def endpoint(pool: str, path: str = "collective", rank: int = 0, **options: Any) -> WorkerEndpoint:
    config = InstanceConfig(
        instance="prefill_decode-0",
        platform="cpu",
        pool=pool,
        pool_bytes=8192,
        path=path,
        **options,
    )
    return WorkerEndpoint(config, DeviceCopies(registry.get("cpu")), rank)


def test_rank_0_publishes_the_paths_that_it_receives_by_until_it_closes(pool: str) -> None:
    worker = endpoint(pool)
    found = read_publication(pool)
    assert [path.path for path in found.paths] == ["collective"]
    assert found.paths[0].address.startswith("127.0.0.1:")
    assert found.slab == ""
    worker.close()
    with pytest.raises(TransportError, match="is not there"):
        read_publication(pool)


def test_a_worker_that_starts_anew_replaces_what_was_published(pool: str) -> None:
    first = endpoint(pool)
    before = read_publication(pool)
    second = endpoint(pool)
    after = read_publication(pool)
    assert before.session != after.session
    second.close()
    first.close()


@pytest.mark.parametrize(("path", "rank"), [("shm", 0), ("tcp", 0), ("auto", 0), ("collective", 1)])
def test_a_worker_that_receives_nothing_by_itself_publishes_nothing(
    pool: str, path: str, rank: int
) -> None:
    worker = endpoint(pool, path, rank)
    assert worker.slab_bytes == 0
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []
    worker.close()


def test_what_a_worker_published_that_has_ended_is_an_error(pool: str) -> None:
    pid, start, namespace, rest = new_session().split("-")
    ended = "-".join([pid, str(int(start) + 1), namespace, rest])
    publication = Publication(session=ended, slab="", paths=(PathEndpoint(path="ipc"),))
    (SHM_FOLDER / f"{pool}.worker").write_bytes(msgspec.msgpack.encode(publication))
    with pytest.raises(TransportError, match=f"{ended}, which has ended"):
        read_publication(pool)


def test_every_rank_maps_the_pool_s_file_when_it_first_needs_it(pool: str) -> None:
    workers = [endpoint(pool, "shm", rank) for rank in (0, 1)]
    memory = SharedMemory.create(pool, 8192)
    memory.tensor(64, 4).fill_(9)
    for worker in workers:
        assert worker.host.tensor(64, 4).eq(9).all()
        worker.close()


def test_a_worker_that_cannot_open_its_paths_leaves_nothing(pool: str) -> None:
    with pytest.raises(TransportError, match=r"cannot receive on 256\.0\.0\.1"):
        endpoint(pool, host="256.0.0.1", trusted_network=True)
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []
