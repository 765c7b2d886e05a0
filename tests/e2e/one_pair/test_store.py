"""Encoder outputs that real engines have stored, and load again when they know nothing of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.asking import Answer, ask, assert_brought, assert_equal, picture, text
from tests.e2e.conftest import Pair, Split, every_instance_is_up, router_of
from tests.e2e.engines import (
    RESTART_S,
    both_serve,
    config_of,
    exposition,
    forget_items,
    instance,
    wait_until,
)
from tests.forked import Popen

SEEDS = (7900, 7901, 7902)
CONTENTS = [
    [text("Look at this."), picture(seed), text("What is in the picture?")] for seed in SEEDS
]
CONTENTS.append([picture(SEEDS[0]), picture(SEEDS[1]), text("Compare these.")])


@pytest.fixture(scope="module")
def router(engines: Split) -> dict[str, object]:
    section = config_of(instance(engines.pid, "ec_producer")).store
    assert section is not None
    return {"store": section.model_dump()}


@pytest.fixture(scope="module")
def first(pair: Pair) -> list[Answer]:
    """Answers by transfer, whose pictures are stored from then on."""
    answers = [ask(pair.split.url, content) for content in CONTENTS]
    assert {source for answer in answers[:3] for source in answer.sources} == {"transfer"}
    hashes = {item["mm_hash"] for answer in answers[:3] for item in answer.items}
    wait_until(
        lambda: hashes <= {event["mm_hash"] for event in pair.split.events("store.written")},
        "the pictures are stored",
    )
    return answers


def stored_counts(split: Split, role: str) -> dict[str, int]:
    """Return what an instance has counted of the store, but for what it has not met."""
    lines = [line for line in exposition(split.pid, role) if line.startswith("epd_")]
    samples = (line.rpartition(" ") for line in lines if "_store_" in line and "_total" in line)
    found = {name: int(float(value)) for name, _, value in samples}
    return {name: value for name, value in found.items() if value}


def check_all_from_store(split: Split, first: list[Answer]) -> None:
    begin_s = time.monotonic()
    for content, before in zip(CONTENTS, first, strict=True):
        answer = ask(split.url, content)
        assert_brought(answer, content, "store", "encoder_cache")
        assert answer.tokens == before.tokens
        assert_equal(answer, before)
    encoded = {
        item for event in split.events("encode.begin", since_s=begin_s) for item in event["items"]
    }
    assert not encoded & {item["mm_hash"] for answer in first for item in answer.items}


def test_pictures_that_engines_have_forgotten_come_from_the_store(
    pair: Pair, first: list[Answer]
) -> None:
    forget_items(pair.split.pid)
    check_all_from_store(pair.split, first)
    loaded = pair.split.events("store.loaded")
    assert stored_counts(pair.split, "ec_consumer") == {
        'epd_pd_store_items_total{result="hit"}': len(loaded),
        "epd_pd_store_loaded_bytes_total": sum(event["nbytes"] for event in loaded),
    }
    written = stored_counts(pair.split, "ec_producer")
    assert written["epd_encode_store_writes_total"] >= len(SEEDS)
    assert written["epd_encode_store_written_bytes_total"] >= len(SEEDS) * loaded[0]["nbytes"]
    for content, answer in zip(CONTENTS, first, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))


@pytest.fixture
def bare(
    pair: Pair,
    engines: Split,
    router: dict[str, object],
    first: list[Answer],
    fork: Popen,
    tmp_path: Path,
) -> Iterator[Split]:
    """A router that sends pictures as what their entries say of them."""
    log = tmp_path / "bare.log"
    with router_of(engines, log, fork, media="metadata", **router) as split:
        # It hears in an answer what the encode instance writes.
        ask(split.url, [picture(990), text("What is it?")])
        yield split


def test_a_picture_that_nobody_sends_comes_from_the_store(bare: Split, first: list[Answer]) -> None:
    forget_items(bare.pid)
    check_all_from_store(bare, first)


@pytest.mark.full
def test_pictures_come_from_the_store_when_all_engines_were_started_again(
    pair: Pair, first: list[Answer]
) -> None:
    before = [instance(pair.split.pid, role).pid for role in ("ec_producer", "ec_consumer")]
    for pid in before:
        os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, before)), "they have ended")
    wait_until(lambda: both_serve(pair.split.pid), "both serve again", within_s=RESTART_S)
    wait_until(lambda: every_instance_is_up(pair.split), "they are used", within_s=RESTART_S)
    check_all_from_store(pair.split, first)
