"""A store in a real redis-server under small engines: what it outlives, and what its faults cost.

Whatever happens to the store, every answer is right; nothing of a broken store is waited for twice.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from epd_portable.launch.plan.machine import port_source
from tests.faults.small.pictures import Picture
from tests.faults.small.workers import WEIGHTS
from tests.faults.topology import DEADLINE_S, Reply, Topology
from tests.faults.traffic import check, quiet, send
from tests.kit.commands import run
from tests.kit.shm import ROOT, small_shm
from tests.metrics_page import total
from tests.servers import RedisServer

pytestmark = pytest.mark.needs_redis

TIMEOUT_MS = 1500.0
AT_ONCE = 12
ENTRIES = "epd:1:entry:*"


class Stored:
    """A topology with a store."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder, port_source(secrets.token_hex(4))())
        self.folder = folder
        self.section = self.server.section(timeout_ms=TIMEOUT_MS, max_bytes=64 << 20)
        self.topology = Topology(folder / "run", store=self.section)
        self.client = self.server.client()
        self.ask([[Picture("first")]])

    def close(self) -> None:
        self.topology.close()
        self.client.close()
        self.server.kill()

    def ask(self, asked: Sequence[Sequence[Picture]]) -> list[Reply]:
        """Send requests at the same time; every answer must be right."""
        replies = send(self.topology, asked)
        check(asked, replies, failures=False)
        return replies

    def entries(self) -> list[bytes]:
        return list(self.client.keys(ENTRIES))

    def store(self, name: str, count: int = AT_ONCE) -> list[list[Picture]]:
        """Have requests answered, and wait until all of their pictures are stored."""
        asked = [
            [Picture(f"{name}/{number}", (16, 40, 200)[number % 3])] for number in range(count)
        ]
        before = len(self.entries())
        self.ask(asked)
        self.topology.until(lambda: len(self.entries()) >= before + count, "all is stored")
        self.forget()
        return asked

    def forget(self) -> None:
        """Empty the caches of all instances."""
        for name in self.topology.names:
            self.topology.state(name, reset=True)

    def until_used(self) -> None:
        """Wait until the store is asked, written and loaded from again."""

        def used() -> bool:
            picture = [[Picture(secrets.token_hex(4))]]
            self.ask(picture)
            time.sleep(0.2)
            self.forget()
            return self.ask(picture)[0].sources == ("store",)

        # Two PD instances and two encoders have found out each for itself.
        for _ in range(4):
            self.topology.until(used, "the store is used again")

    def counted(self, result: str) -> int:
        """Return how many items the front looked up with this result."""
        return self._metric(f'epd_front_store_items_total{{result="{result}"}}')

    def encoded(self) -> int:
        """Return how many items of requests an encode engine has brought."""
        return self._metric('epd_front_items_total{outcome="encoded"}')

    def _metric(self, line: str) -> int:
        text = httpx.get(f"{self.topology.url}/metrics", timeout=DEADLINE_S).text
        return int(total(text, line))

    def check_nothing_is_left(self) -> None:
        self.topology.until_empty(lambda: quiet(self.topology))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    stored = Stored(tmp_path_factory.mktemp("store"))
    try:
        yield stored
    finally:
        stored.close()


def sources(replies: Sequence[Reply]) -> set[str]:
    return {source for reply in replies for source in reply.sources}


def test_store_serves_an_item_encoded_once_to_every_engine(stored: Stored) -> None:
    asked = stored.store("once")
    jobs, hits = stored.encoded(), stored.counted("hit")
    for _ in range(2):
        assert sources(stored.ask(asked)) == {"store"}
        stored.forget()
    assert stored.counted("hit") == hits + 2 * AT_ONCE
    assert stored.encoded() == jobs
    stored.check_nothing_is_left()


@pytest.mark.full
def test_store_outlives_every_engine(stored: Stored) -> None:
    asked = stored.store("outlive")
    topology = stored.topology
    pids = topology.faults.folder / "pids"
    for name in topology.names:
        os.kill(int((pids / f"{name}.scheduler").read_text()), signal.SIGKILL)
    topology.until(lambda: not topology.healthy(), "the front has noticed")
    topology.until(topology.recovered, "every process serves")
    assert sources(stored.ask(asked)) == {"store"}
    stored.check_nothing_is_left()


def another_byte(found: bytes) -> bytes:
    """Return bytes of which the first is another one, whatever it was."""
    return bytes([found[0] ^ 1]) + found[1:]


DAMAGES = {
    "a byte of the payload": lambda fields: {
        "d0": fields[b"d0"][:-1] + bytes([fields[b"d0"][-1] ^ 1])
    },
    "half of the payload": lambda fields: {"d0": fields[b"d0"][: len(fields[b"d0"]) // 2]},
    "a byte of the head": lambda fields: {"h": another_byte(fields[b"h"])},
    "no head": lambda fields: {"h": b""},
    "a pickle": lambda fields: {"h": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x."},
    "no payload": lambda fields: {"d0": b""},
}


def test_damaged_entries_are_found_encoded_anew_and_written_anew(stored: Stored) -> None:
    asked = stored.store("damaged")
    stored.client.flushall()
    stored.forget()
    stored.ask(asked)
    stored.topology.until(lambda: len(stored.entries()) == AT_ONCE, "all is stored")
    # A picture that two encoders were asked for is written twice.
    stored.check_nothing_is_left()
    entries = stored.entries()
    damages = list(DAMAGES.values())
    for number, name in enumerate(entries):
        fields = stored.client.hgetall(name)
        stored.client.hset(name, mapping=damages[number % len(damages)](fields))
    before, jobs = stored.counted("corrupt"), stored.encoded()
    assert sources(stored.ask(asked)) == {"transfer"}
    # The front reads heads; the rest is found by PD instances.
    assert stored.counted("corrupt") - before == AT_ONCE // len(DAMAGES) * 3
    assert stored.encoded() - jobs == AT_ONCE
    stored.check_nothing_is_left()

    def all_stored() -> bool:
        stored.forget()
        return sources(stored.ask(asked)) == {"store"}

    stored.topology.until(all_stored, "all is written anew, and read")


@pytest.mark.full
def test_an_entry_of_another_item_is_found(stored: Stored) -> None:
    asked = stored.store("swapped", 2)
    # Those that expire last were written last.
    first, second = sorted(stored.entries(), key=stored.client.pexpiretime)[-2:]
    fields = [stored.client.hgetall(name) for name in (first, second)]
    stored.client.hset(first, mapping=fields[1])
    stored.client.hset(second, mapping=fields[0])
    assert "store" not in sources(stored.ask(asked))
    stored.check_nothing_is_left()


def test_hung_store_is_waited_for_once_and_reused_later(stored: Stored) -> None:
    asked = stored.store("hangs")
    stored.server.stop()
    try:
        failed = stored.counted("error")
        for round_ in range(3):
            more = [[Picture(f"hung/{round_}/{number}", 40)] for number in range(AT_ONCE)]
            assert "store" not in sources(stored.ask([*asked, *more]))
        # Those that asked before the first had waited for too long, and who tried it again.
        assert stored.counted("error") - failed <= 2 * AT_ONCE + 6
        assert stored.counted("unavailable") > 0
    finally:
        stored.server.go_on()
    stored.until_used()
    stored.check_nothing_is_left()


@pytest.mark.full
def test_store_hung_during_loads_costs_no_response(stored: Stored) -> None:
    """The front has its hits; the PD instances make no progress."""
    asked = stored.store("stops midway", 2 * AT_ONCE)
    for _ in range(3):
        stopping = threading.Timer(0.05, stored.server.stop)
        stopping.start()
        try:
            stored.ask(asked)
        finally:
            stopping.join()
            stored.server.go_on()
        stored.forget()
        stored.until_used()
    stored.check_nothing_is_left()


@pytest.mark.full
def test_server_killed_and_started_again_is_filled_again(stored: Stored) -> None:
    asked = stored.store("killed")
    stored.server.kill()
    assert "store" not in sources(stored.ask(asked))
    stored.forget()
    stored.ask(asked)
    stored.server.start()
    stored.until_used()
    stored.check_nothing_is_left()


@pytest.mark.full
def test_a_server_that_is_flushed_under_load_costs_no_answer(stored: Stored) -> None:
    asked = stored.store("flushed")
    for _ in range(5):
        stored.client.flushall()
        stored.ask(asked)
        stored.forget()
    stored.until_used()
    stored.check_nothing_is_left()


def test_store_without_memory_serves_reads_only(stored: Stored) -> None:
    asked = stored.store("full")
    stored.client.config_set("maxmemory-policy", "noeviction")
    # Less than it holds, whatever the buffers of its clients take at the moment.
    stored.client.config_set("maxmemory", 1)
    try:
        more = [[Picture(f"too much/{number}", 200)] for number in range(AT_ONCE)]
        assert sources(stored.ask(more)) == {"transfer"}
        # A load that comes too late, on a busy machine, leaves the store alone for a while.
        stored.topology.until(
            lambda: stored.forget() is None and sources(stored.ask(asked)) == {"store"}, "it gives"
        )
        stored.forget()
        assert "store" not in sources(stored.ask(more))
    finally:
        stored.client.config_set("maxmemory", 0)
    stored.until_used()
    stored.check_nothing_is_left()


@pytest.mark.full
def test_engines_with_other_weights_share_no_store_entries(stored: Stored) -> None:
    asked = stored.store("weights")
    entries = set(stored.entries())
    other = Topology(stored.folder / "other", store=stored.section, env={WEIGHTS: "2"})
    try:
        first = [[Picture("first")]]
        check(first, send(other, first), failures=False)
        replies = send(other, asked)
        check(asked, replies, failures=False)
        assert sources(replies) == {"transfer"}
        other.until(lambda: len(set(stored.entries()) - entries) > len(asked), "it has its own")
        for name in other.names:
            other.state(name, reset=True)
        replies = send(other, asked)
        check(asked, replies, failures=False)
        assert sources(replies) == {"store"}
    finally:
        other.close()
    assert sources(stored.ask(asked)) == {"store"}


FULL_DISK = """
import sys
from tests.contract.test_store import MiB, entry, files, key, loaded, make_store
from epd_portable.config.store import StoreSection
from epd_portable.errors import StoreFullError
from pathlib import Path
store = make_store(StoreSection(kind="file", path="/dev/shm/store"))
for number in range(40):
    store.save_caches([entry(f"{number}", MiB // 8, fill=number)])
    assert loaded(store, f"{number}", MiB // 8) == bytes([number]) * (MiB // 8)
kept = [number for number in range(40) if loaded(store, f"{number}", MiB // 8)]
assert kept and kept == list(range(kept[0], 40)), kept
filler = open("/dev/shm/filler", "wb", buffering=0)
try:
    while filler.write(b"x" * 4096):
        pass
except OSError:
    pass
try:
    store.save_caches([entry("large", MiB, fill=1)])
except StoreFullError as error:
    print(error)
assert not list(Path("/dev/shm/store").rglob("drafts/*"))
"""


def test_disk_smaller_than_store_may_be_keeps_latest_entries() -> None:
    done = run(*small_shm(), sys.executable, "-c", FULL_DISK, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "enlarge the disk" in done.stdout
