"""Server of every client: one topology with the bundled model, started by ``tests.clients``."""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw

QUESTION = QUESTIONS[QuestionKind.DESCRIBE]
MODEL = "demo"
KEY = "none"
DEADLINE_S = 20.0
OUTCOMES = re.compile(r'^epd_front_items_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)

Encodes = Callable[[int], AbstractContextManager[None]]
"""Checks that encoders had so many pictures meanwhile, and that none went another way.

The front asks no encoder for one that the engine which answers holds since an earlier test.
"""


def data_url(seed: int) -> str:
    return draw(seed).data_url()


def base64_of(seed: int) -> str:
    return data_url(seed).partition(",")[2]


def seen_in(seed: int) -> str:
    """Return what the model says of a picture."""
    return draw(seed).scene.answer(QuestionKind.DESCRIBE)


def question(seed: int) -> list[dict[str, object]]:
    """Return a chat about one picture."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(seed)}},
        {"type": "text", "text": QUESTION},
    ]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["EPD_CLIENTS_URL"]


@pytest.fixture(scope="session")
def v1(url: str) -> str:
    return f"{url}/v1"


def _outcomes(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as answer:
        return {
            outcome: float(count) for outcome, count in OUTCOMES.findall(answer.read().decode())
        }


@pytest.fixture
def encodes(url: str) -> Encodes:
    @contextmanager
    def check(count: int) -> Iterator[None]:
        before = _outcomes(url)
        yield
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            seen = {
                outcome: now - before.get(outcome, 0) for outcome, now in _outcomes(url).items()
            }
            # A job may end a little later than the answer.
            if sum(seen.values()) >= count or time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        assert sum(seen.values()) == count
        assert {outcome for outcome, more in seen.items() if more} <= {"encoded", "not_needed"}

    return check


def run(*argv: str | Path, within_s: float = 300.0, **env: str) -> str:
    """Run a client that is a command; return what it prints."""
    done = subprocess.run(
        list(map(str, argv)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
        # None of them may ask anybody else.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", **env},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
