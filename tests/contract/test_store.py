"""Contract of every kind of store: files on a disk, and a real redis-server."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.errors import CorruptEntryError, StoreError, StoreFullError
from epd_portable.launch.plan.machine import port_source
from epd_portable.transfer.stores.base import Entry, Store, make_store
from epd_portable.transfer.stores.entry import Seal
from epd_portable.wire.descriptors import DTYPE_BYTES, TensorSpec
from tests.certificates import make_certificate
from tests.servers import RedisServer

SEAL = Seal(Secret("s" * 40))
NAMESPACE = SEAL.namespace("model")
MiB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    server = RedisServer(folder, port_source(secrets.token_hex(4))())
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """Yield a client of the server, which is empty."""
    with server.client() as made:
        made.flushall()
        yield made


@pytest.fixture
def in_redis(server: RedisServer, client: Any) -> Iterator[Store]:
    made = make_store(server.section(timeout_ms=60_000))
    yield made
    made.close()


Make = Callable[..., Store]


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.needs_redis), "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return what opens the same store again and again, in any configuration."""
    opened: list[Store] = []
    section: Callable[..., StoreSection]
    if request.param == "redis":
        request.getfixturevalue("client")
        section = request.getfixturevalue("server").section
    else:
        section = lambda **keys: StoreSection(kind="file", path=str(tmp_path / "store"), **keys)  # noqa: E731

    def open_one(**keys: object) -> Store:
        # Machines of tests may stand still for long.
        opened.append(make_store(section(**{"timeout_ms": 60000, **keys})))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def key(name: str) -> str:
    return SEAL.key(NAMESPACE, name, "image")


def entry(name: str, nbytes: int = 4096, *, dtype: str = "float32", fill: int = 1) -> Entry:
    spec = TensorSpec(shape=(nbytes // (64 * DTYPE_BYTES[dtype]), 64), dtype=dtype)
    payload = memoryview(bytes([fill]) * spec.nbytes)
    return SEAL.entry(payload, key=key(name), mm_hash=name, modality="image", tensor=spec)


def loaded(store: Store, name: str, nbytes: int = 4096) -> bytes | None:
    """Return an entry's bytes, checked; ``None`` if it is not there."""
    into = memoryview(bytearray(nbytes))
    raw = store.load_cache(key(name), into)
    if raw is None:
        return None
    SEAL.check(SEAL.open(raw, key(name)), into)
    return bytes(into)


def test_written_entry_is_found_and_loaded_by_another(make: Make) -> None:
    writer, reader = make(), make()
    entries = [entry("cat", fill=1), entry("dog", fill=2)]
    assert reader.has_caches([key("cat")]) == [None]
    assert writer.save_caches(entries) == 0
    found = reader.has_caches([key("dog"), key("bird"), key("cat")])
    assert found == [entries[1].head, None, entries[0].head]
    assert loaded(reader, "cat") == bytes(entries[0].payload)
    assert loaded(reader, "dog") == bytes(entries[1].payload)
    assert loaded(reader, "bird") is None
    assert reader.has_caches([]) == []


@pytest.mark.parametrize(
    ("nbytes", "dtype"), [*((4096, each) for each in DTYPE_BYTES), (48 * MiB, "float32")]
)
def test_entry_of_any_dtype_and_size_is_kept_whole(make: Make, nbytes: int, dtype: str) -> None:
    store = make()
    store.save_caches([entry("cat", nbytes, dtype=dtype, fill=7)])
    assert loaded(store, "cat", nbytes) == b"\7" * nbytes


def test_an_entry_that_is_written_again_is_replaced(make: Make) -> None:
    store = make(max_bytes=2 * MiB)
    for fill in range(1, 9):
        assert store.save_caches([entry("cat", MiB, fill=fill)]) == 0
    assert loaded(store, "cat", MiB) == b"\x08" * MiB


def test_a_discarded_entry_is_gone_and_can_be_written_anew(make: Make) -> None:
    store = make()
    store.save_caches([entry("cat")])
    store.discard(key("cat"))
    store.discard(key("cat"))
    assert store.has_caches([key("cat")]) == [None]
    store.save_caches([entry("cat", fill=9)])
    assert loaded(store, "cat") == b"\x09" * 4096


@pytest.mark.parametrize("nbytes", [4032, 4160])
def test_an_entry_of_another_size_than_is_expected_is_damaged(make: Make, nbytes: int) -> None:
    store = make()
    store.save_caches([entry("cat")])
    with pytest.raises(CorruptEntryError, match="4096"):
        store.load_cache(key("cat"), memoryview(bytearray(nbytes)))
    assert loaded(store, "cat") == bytes(entry("cat").payload), "nothing of it is left behind"


def test_least_recently_used_entry_is_evicted_first(make: Make) -> None:
    store = make(max_bytes=4 * MiB + 65536)
    names = ["a", "b", "c", "d"]
    for name in names:
        store.save_caches([entry(name, MiB)])
        time.sleep(0.02)
    assert store.has_caches([key("a")]) != [None]  # Now b is the one that was not used.
    time.sleep(0.02)
    assert loaded(store, "c", MiB) is not None
    time.sleep(0.02)
    assert store.save_caches([entry("e", MiB)]) >= 1
    there = [head is not None for head in store.has_caches(list(map(key, [*names, "e"])))]
    assert there[0] and not there[1] and there[2] and there[4], there


def test_sum_of_entries_stays_below_the_limit(make: Make) -> None:
    store = make(max_bytes=3 * MiB)
    for number in range(20):
        store.save_caches([entry(f"{number}", MiB // 2)])
        names = [key(f"{each}") for each in range(number + 1)]
        held = [head for head in store.has_caches(names) if head is not None]
        assert len(held) <= 6
    assert len(held) >= 4
    assert "of at most 3 MiB" in store.check()


def test_an_entry_larger_than_the_whole_store_is_refused(make: Make) -> None:
    store = make(max_bytes=MiB)
    with pytest.raises(StoreFullError, match="max_bytes"):
        store.save_caches([entry("cat", 2 * MiB)])
    assert store.has_caches([key("cat")]) == [None]


def test_unused_entry_expires(make: Make) -> None:
    store = make(ttl_s=0.3)
    store.save_caches([entry("cat")])
    deadline_s = time.monotonic() + 30
    while store.load_cache(key("cat"), memoryview(bytearray(4096))) is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.5)  # Longer than its time: that it was read keeps it no longer.


def _write(section: str, number: int) -> None:
    store = make_store(StoreSection.model_validate_json(section))
    for each in range(20):
        store.save_caches([entry(f"{number}-{each}", 64 * 1024, fill=number + 1)])
        store.save_caches([entry("shared", 64 * 1024, fill=number + 1)])
    store.close()


def test_many_processes_write_at_once_and_every_entry_is_whole(
    make: Make, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = make(max_bytes=2 * MiB)
    if "redis" in request.node.callspec.id:
        section = request.getfixturevalue("server").section(max_bytes=2 * MiB, timeout_ms=20_000)
    else:
        path = str(tmp_path / "store")
        section = StoreSection(kind="file", path=path, max_bytes=2 * MiB, timeout_ms=20_000)
    forking = multiprocessing.get_context("fork")
    writers = [
        forking.Process(target=_write, args=(section.model_dump_json(), number))
        for number in range(4)
    ]
    for writer in writers:
        writer.start()
    read, over = 0, threading.Event()
    watcher = threading.Thread(target=lambda: ([each.join() for each in writers], over.set()))
    watcher.start()
    while not over.is_set() or not read:
        found = loaded(store, "shared", 64 * 1024)  # Raises if half of it is another's.
        read += found is not None
    watcher.join()
    assert [each.exitcode for each in writers] == [0] * 4
    names = [f"{number}-{each}" for number in range(4) for each in range(20)]
    kept = [name for name in names if loaded(store, name, 64 * 1024) is not None]
    assert 10 <= len(kept) <= 32, kept


@pytest.mark.needs_redis
@pytest.mark.parametrize("damage", ["gone", "shorter", "another's"])
def test_a_damaged_part_of_a_large_entry_is_found(
    in_redis: Store, client: Any, damage: str
) -> None:
    in_redis.save_caches([entry("cat", 12 * MiB), entry("dog", 12 * MiB, fill=2)])
    cat, dog = (f"epd:1:entry:{key(name)}" for name in ("cat", "dog"))
    assert sorted(client.hkeys(cat)) == [b"d0", b"d1", b"d2", b"h"]
    if damage == "gone":
        client.hdel(cat, "d1")
    else:
        data = client.hget(dog, "d1")
        client.hset(cat, "d1", data[:-1] if damage == "shorter" else data)
    with pytest.raises(CorruptEntryError):
        loaded(in_redis, "cat", 12 * MiB)
    assert loaded(in_redis, "dog", 12 * MiB) == b"\2" * (12 * MiB)


@contextlib.contextmanager
def redis(folder: Path, **options: str) -> Iterator[tuple[RedisServer, Callable[..., Store]]]:
    """Start a server; yield what opens stores in it, by keys of the section `store`."""
    server = RedisServer(folder, port_source(secrets.token_hex(4))(), **options)
    with contextlib.ExitStack() as opened:
        opened.callback(server.kill)

        def store(**keys: object) -> Store:
            made = make_store(StoreSection(**{"kind": "redis", "url": server.url, **keys}))
            opened.callback(made.close)
            return made

        yield server, store


@pytest.mark.needs_redis
def test_a_server_that_hangs_is_an_error_in_time(tmp_path: Path) -> None:
    with redis(tmp_path) as (server, make):
        store = make(timeout_ms=1000)
        store.save_caches([entry("cat")])
        server.stop()
        for ask in (
            lambda: store.has_caches([key("cat")]),
            lambda: store.load_cache(key("cat"), memoryview(bytearray(4096))),
            lambda: store.save_caches([entry("dog")]),
            lambda: store.discard(key("cat")),
        ):
            with pytest.raises(StoreError):
                ask()
        server.go_on()
        assert loaded(store, "cat") is not None
        server.kill()
        with pytest.raises(StoreError):
            store.has_caches([key("cat")])
        server.start()
        assert store.has_caches([key("cat")]) == [None]


@pytest.mark.needs_redis
def test_server_without_memory_is_full_and_readable(tmp_path: Path) -> None:
    with redis(tmp_path, maxmemory="8mb", maxmemory_policy="noeviction") as (_, make):
        store = make()
        store.save_caches([entry("cat", MiB)])
        with pytest.raises(StoreFullError, match="maxmemory"):
            for number in range(20):
                store.save_caches([entry(f"{number}", MiB)])
        assert loaded(store, "cat", MiB) is not None


@pytest.mark.needs_redis
def test_a_password_comes_from_a_file_and_is_never_told(tmp_path: Path) -> None:
    word, path = secrets.token_hex(16), tmp_path / "password"
    path.touch(0o600)
    path.write_text(word)
    with redis(tmp_path, requirepass=word) as (_, make):
        make(password_file=str(path)).save_caches([entry("cat")])
        path.write_text("wrong" + word)
        with pytest.raises(StoreError) as error:
            make(password_file=str(path)).check()
        assert word not in str(error.value)


@pytest.mark.needs_redis
def test_a_server_with_tls_is_asked_only_if_it_proves_who_it_is(tmp_path: Path) -> None:
    cert, private = map(str, make_certificate(tmp_path, names="IP:127.0.0.1"))
    port = str(port_source(secrets.token_hex(4))())
    files = {"tls_cert_file": cert, "tls_key_file": private, "tls_ca_cert_file": cert}
    with redis(tmp_path, tls_port=port, tls_auth_clients="no", **files) as (_, make):
        known, *others = (
            make(url=f"rediss://{host}:{port}", tls_ca_file=file)
            for host, file in (("127.0.0.1", cert), ("127.0.0.1", None), ("localhost", cert))
        )
        known.save_caches([entry("cat")])
        assert loaded(known, "cat") is not None
        for store in others:
            with pytest.raises(StoreError, match="certificate"):
                store.has_caches([key("cat")])


@pytest.mark.needs_redis
def test_removed_entries_are_not_counted(server: RedisServer, client: Any) -> None:
    store = make_store(server.section(max_bytes=4 * MiB))
    assert store.has_caches([key("bird")]) == [None]
    assert client.zcard("epd:1:index") == 0, "asking counts nothing"
    for number in range(3):
        store.save_caches([entry(f"{number}", MiB)])
    client.delete(*client.keys("epd:1:entry:*"))
    for number in range(3, 9):
        store.save_caches([entry(f"{number}", MiB)])
    there = store.has_caches([key(f"{number}") for number in range(9)])
    found = [head is not None for head in there]
    # Of those that were stored within one millisecond any may be the oldest.
    assert not any(found[:3])
    assert sum(found) == 3
    client.flushall()
    store.save_caches([entry("cat", MiB)])
    assert loaded(store, "cat", MiB) is not None
    store.close()


@pytest.mark.needs_redis
def test_foreign_file_in_place_of_a_head_harms_no_other_entry(in_redis: Store, client: Any) -> None:
    in_redis.save_caches([entry("cat"), entry("long")])
    client.hset(f"epd:1:entry:{key('long')}", "h", bytes(1 << 20))
    client.set(f"epd:1:entry:{key('other type')}", b"x")
    client.config_resetstat()
    names = ("long", "other type", "bird", "cat")
    found = in_redis.has_caches([key(name) for name in names])
    assert found[:3] == [b"", b"", None]
    assert SEAL.open(found[3] or b"", key("cat")).mm_hash == "cat"
    assert client.info("stats")["total_net_output_bytes"] < 1 << 16
    for name in ("long", "other type"):
        in_redis.discard(key(name))
    in_redis.save_caches([entry("long"), entry("other type")])
    assert all(loaded(in_redis, name) is not None for name in ("long", "other type", "cat"))


@pytest.mark.needs_redis
@pytest.mark.parametrize("field", ["h", "d0"])
def test_planted_value_is_not_read_when_loaded(in_redis: Store, client: Any, field: str) -> None:
    in_redis.save_caches([entry("cat")])
    client.hset(f"epd:1:entry:{key('cat')}", field, bytes(1 << 20))
    client.config_resetstat()
    with pytest.raises(CorruptEntryError, match="1048576"):
        loaded(in_redis, "cat")
    assert client.info("stats")["total_net_output_bytes"] < 1 << 16


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def of_files(tmp_path: Path, **keys: object) -> Store:
    return make_store(StoreSection(kind="file", path=str(tmp_path), **keys))  # type: ignore[arg-type]


def test_file_entry_survives_short_reads_and_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.preadv, os.write
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:1000]], at))
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1000]))
    store = of_files(tmp_path)
    before = os.listdir("/proc/self/fd")
    for name in ("cat", "dog"):
        store.save_caches([entry(name)])
        assert loaded(store, name) == bytes(entry(name).payload)
        store.discard(key(name))
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize(("number", "is_kept"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_entry_is_written_again_on_a_full_disk_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_kept: bool
) -> None:
    write, failures = os.write, [OSError(number, os.strerror(number))]

    def fail_first(file: int, data: bytes) -> int:
        if failures:
            raise failures.pop()
        return write(file, data)

    monkeypatch.setattr(os, "write", fail_first)
    store = of_files(tmp_path)
    with contextlib.nullcontext() if is_kept else pytest.raises(StoreError, match="written"):
        store.save_caches([entry("cat")])
    assert (loaded(store, "cat") is not None) is is_kept


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 4000, 4400])
def test_a_half_written_file_is_damaged_or_not_there(tmp_path: Path, size: int) -> None:
    store = of_files(tmp_path)
    store.save_caches([entry("cat")])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    assert size < len(whole)
    path.write_bytes(whole[:size])
    with pytest.raises(CorruptEntryError):
        loaded(store, "cat")
    (head,) = store.has_caches([key("cat")])
    if size < 400:
        assert head is not None
        with pytest.raises(CorruptEntryError):
            SEAL.open(head, key("cat"))


def test_a_file_for_another_key_is_damaged(tmp_path: Path) -> None:
    store = of_files(tmp_path)
    store.save_caches([entry("cat"), entry("dog")])
    cat, dog = (
        next(each for each in files(tmp_path) if key(name) in each.name) for name in ("cat", "dog")
    )
    dog.write_bytes(cat.read_bytes())
    with pytest.raises(CorruptEntryError):
        loaded(store, "dog")


def test_links_devices_and_pipes_are_not_opened(tmp_path: Path) -> None:
    store = of_files(tmp_path)
    store.save_caches([entry("cat")])
    (path,) = files(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(StoreError):
        loaded(store, "cat")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError):
        loaded(store, "cat")


def test_foreign_files_do_not_prevent_eviction(tmp_path: Path) -> None:
    store = of_files(tmp_path, max_bytes=MiB)
    store.save_caches([entry("cat")])
    (path,) = files(tmp_path / "epd-store-1")
    path.with_name("bad.safetensors").write_bytes(b"no entry")
    os.utime(path.with_name("bad.safetensors"), (1, 1))
    (path.parent / "loop").symlink_to("loop")
    (path.parent / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(path.parent / "pipe.safetensors")
    for number in range(8):
        store.save_caches([entry(f"{number}", MiB // 4)])
    assert not path.with_name("bad.safetensors").exists()
    assert loaded(store, "7", MiB // 4) is not None


@pytest.mark.parametrize("plant", [Path.symlink_to, os.mkfifo], ids=["link", "pipe"])
def test_foreign_folders_and_links_are_removed(tmp_path: Path, plant: Callable[..., None]) -> None:
    store = of_files(tmp_path)
    store.save_caches([entry("cat"), entry("dog")])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * 4096)
    path = next(each for each in files(tmp_path) if key("cat") in each.name)
    path.unlink()
    plant(path, *([elsewhere] if plant is Path.symlink_to else []))
    bad, good = store.has_caches([key("cat"), key("dog")])
    assert bad == b"" and good
    store.discard(key("cat"))
    assert not os.path.lexists(path) and elsewhere.read_bytes() == b"x" * 4096
    store.save_caches([entry("cat")])
    assert loaded(store, "cat") is not None


@pytest.mark.parametrize("name", ["epd-store-1", "epd-store-1/usage"])
def test_a_link_in_a_folders_or_files_place_is_not_followed(tmp_path: Path, name: str) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (root / name).parent.mkdir(parents=True)
    if name.endswith("usage"):
        elsewhere.write_bytes(b"mine")
    else:
        elsewhere.mkdir()
    (root / name).symlink_to(elsewhere)
    store = of_files(root)
    with contextlib.suppress(StoreError):
        store.save_caches([entry("cat")])
    assert elsewhere.is_dir() or elsewhere.read_bytes() == b"mine"
    assert not elsewhere.is_dir() or not any(elsewhere.iterdir())


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "epd-store-1").mkdir()
    (tmp_path / "epd-store-1").chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        of_files(tmp_path).save_caches([entry("cat")])


def test_writer_with_the_lock_blocks_others_for_a_limited_time(tmp_path: Path) -> None:
    import fcntl

    store = of_files(tmp_path, timeout_ms=100)
    store.save_caches([entry("cat")])
    with (tmp_path / "epd-store-1" / "usage").open() as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="locked"):
            store.save_caches([entry("dog")])
        assert loaded(store, "cat") is not None


def test_drafts_of_dead_writers_go_in_time(tmp_path: Path) -> None:
    store = of_files(tmp_path, max_bytes=MiB)
    store.save_caches([entry("cat")])
    draft = tmp_path / "epd-store-1" / "drafts" / "abc"
    draft.write_bytes(b"x")
    os.utime(draft, (0, 0))
    for number in range(8):
        store.save_caches([entry(f"{number}", MiB // 4)])
    assert not draft.exists()


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    store = of_files(tmp_path)
    store.save_caches([entry("cat", dtype="bfloat16", fill=5)])
    (path,) = files(tmp_path)
    space, _, rest = key("cat").partition("-")  # Entries of other releases are found.
    assert path == tmp_path / "epd-store-1" / space / rest[:2] / f"{space}-{rest}.safetensors"
    found = safetensors.load_file(path)["ec_cache"]
    assert (tuple(found.shape), found.dtype) == ((32, 64), torch.bfloat16)
    assert found.view(torch.uint8).eq(5).all()
