"""Two encode and two PD instances of real engines under a load that goes on.

First one works for others. Then one of each is killed and comes back; in the end all are started
anew, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import TIMEOUT_S, body, picture, post
from tests.e2e.cases import ASK
from tests.e2e.conftest import Split, every_instance_is_up, router_of, running
from tests.e2e.engines import RESTART_S, named, token_of, url_of, wait_until
from tests.forked import Popen

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

NAMES = ("encode-0", "encode-1", "prefill_decode-0", "prefill_decode-1")
FAILED = (500, 502, 503, 504)
CLIENTS = 3
MORE = 8
SETTINGS = (
    "front=router",
    "engine_args.dtype=float32",
    "instances.encode.count=2",
    "instances.prefill_decode.count=2",
)


@pytest.fixture(scope="module")
def split(fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with running(tmp_path_factory.mktemp("two_pairs"), SETTINGS, popen=fork) as found:
        yield found


def questions() -> list[Any]:
    """Return texts and pictures; some of the pictures come again."""
    pictures = [[picture(900 + seed % 6), ASK] for seed in range(8)]
    return [*pictures, *(f"How are you, number {number}?" for number in range(4))]


class Load:
    """Clients that send the same requests again and again, whose responses plain vLLM gave."""

    def __init__(self, split: Split, reference_url: str) -> None:
        self._split = split
        self._contents = questions()
        self._next = itertools.count()
        self._end = threading.Event()
        asked = [post(reference_url, body(content)) for content in self._contents]
        self.expected = [each.json() for each in asked]
        self.seen: list[tuple[int, httpx.Response]] = []
        self._clients = [threading.Thread(target=self._go_on) for _ in range(CLIENTS)]

    def _ask(self, content: Any) -> httpx.Response:
        return post(self._split.url, body(content))

    def _go_on(self) -> None:
        while not self._end.is_set():
            index = next(self._next) % len(self._contents)
            self.seen.append((index, self._ask(self._contents[index])))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        for client in self._clients:
            client.start()
        try:
            yield
        finally:
            self._end.set()
            for client in self._clients:
                client.join()

    def more(self) -> None:
        wanted = len(self.seen) + CLIENTS + MORE
        wait_until(lambda: len(self.seen) >= wanted, "answers go on", within_s=TIMEOUT_S)

    def check(self) -> int:
        """Check all answers; return how many requests have none."""
        lost = 0
        for index, reply in self.seen:
            if reply.status_code != 200:
                assert reply.status_code in FAILED, reply.text
                lost += 1
                continue
            assert words(reply.json()) == words(self.expected[index])
        return lost


def words(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def back(split: Split, name: str, pid: int) -> Callable[[], bool]:
    def is_back() -> bool:
        try:
            return named(split.pid, name).pid != pid and every_instance_is_up(split)
        except AssertionError:
            return False

    return is_back


BY_LOAD = {
    "plugins": [{"type": "queue-scorer"}, {"type": "running-requests-size-scorer"}],
    "schedulingProfiles": [
        {
            "name": "decode",
            "plugins": [
                {"pluginRef": "queue-scorer"},
                {"pluginRef": "running-requests-size-scorer"},
            ],
        }
    ],
}
API_KEY = "k" * 20
ASKED = 12


@contextlib.contextmanager
def busy_for_others(split: Split, name: str) -> Iterator[None]:
    """Let an instance generate for clients of which no router knows."""
    server = named(split.pid, name)
    url, shown, end = url_of(server), token_of(server), threading.Event()

    def keep_asking(number: int) -> None:
        while not end.is_set():
            post(url, body(f"Story {number}", max_tokens=200, ignore_eos=True), headers=shown)

    others = [threading.Thread(target=keep_asking, args=(number,)) for number in range(6)]
    for each in others:
        each.start()
    try:
        yield
    finally:
        end.set()
        for each in others:
            each.join()


def answered_by(split: Split) -> Counter[str]:
    """Ask one text after the other; return whom the router chose."""
    shown = {"authorization": f"Bearer {API_KEY}", "x-epd-explain": "1"}
    found: Counter[str] = Counter()
    for number in range(ASKED):
        answer = post(split.url, body(f"Number {number}?", max_tokens=4), headers=shown)
        (decision, *_) = json.loads(answer.headers["x-epd-explain"])
        found[decision["winner"]] += 1
    return found


def test_an_instance_that_is_busy_for_others_gets_less_where_it_is_asked_how_busy_it_is(
    split: Split, tmp_path: Path, fork: Popen
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(API_KEY)
    keys.chmod(0o600)
    usual = {"api_keys_file": str(keys), "registration": False}
    with busy_for_others(split, "prefill_decode-0"):
        with router_of(split, tmp_path / "rings.log", fork, **usual) as rings:
            by_rings = answered_by(rings)
        with router_of(split, tmp_path / "load.log", fork, choice=BY_LOAD, **usual) as loads:
            wait_until(lambda: answered_by(loads)["prefill_decode-1"] == ASKED, "it has been told")
    # One that is asked in turns with nothing else to do seems as idle as the other.
    assert by_rings["prefill_decode-0"] > 0, by_rings


def test_one_of_each_is_killed_under_a_mixed_load_and_comes_back(
    split: Split, reference_url: str
) -> None:
    load = Load(split, reference_url)
    with load.going_on():
        load.more()
        for name in ("encode-1", "prefill_decode-0"):
            pid = named(split.pid, name).pid
            os.killpg(pid, signal.SIGKILL)
            load.more()
            wait_until(back(split, name, pid), f"{name} is back", within_s=RESTART_S)
            load.more()
    # What the PD instance worked on when it was killed, and what was sent until that was noticed.
    assert load.check() <= 2 * CLIENTS


def test_all_instances_are_started_anew_under_a_mixed_load_and_no_answer_is_lost(
    split: Split, reference_url: str
) -> None:
    load = Load(split, reference_url)
    before = {name: named(split.pid, name).pid for name in NAMES}
    with load.going_on():
        load.more()
        os.kill(split.pid, signal.SIGHUP)
        for name in NAMES:
            wait_until(back(split, name, before[name]), f"{name} is new", within_s=RESTART_S)
        load.more()
    assert load.check() == 0
    assert not {named(split.pid, name).pid for name in NAMES} & set(before.values())
