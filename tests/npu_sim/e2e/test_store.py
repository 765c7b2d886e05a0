"""Encoder outputs of simulated devices are stored, and loaded into simulated devices again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.asking import Answer, ask, assert_brought, assert_equal, picture, text
from tests.e2e.conftest import Pair, forget
from tests.e2e.engines import wait_until
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import simulated

pytestmark = pytest.mark.full

SEEDS = (7900, 7901, 7902)
CONTENTS = [
    [text("Look at this."), picture(seed), text("What is in the picture?")] for seed in SEEDS
]
CONTENTS.append([picture(SEEDS[0]), picture(SEEDS[1]), text("Compare these.")])


@pytest.fixture(scope="module", params=["collective", "ipc"])
def pair(
    request: pytest.FixtureRequest,
    npu_fork: Popen,
    tmp_path_factory: pytest.TempPathFactory,
    reference_url: str,
) -> Iterator[Pair]:
    """Yield a pair with slots in host memory, or with slots on the device."""
    folder = tmp_path_factory.mktemp("store")
    settings = [
        f"transfer.path={request.param}",
        "store.kind=file",
        f"store.path={folder / 'outputs'}",
    ]
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with simulated(folder, settings, env=env, popen=npu_fork) as split:
        yield Pair(split=split, reference_url=reference_url)


def test_images_evicted_from_devices_come_from_the_store(pair: Pair) -> None:
    first: list[Answer] = [ask(pair.split.url, content) for content in CONTENTS]
    hashes = {item["mm_hash"] for answer in first for item in answer.items}
    wait_until(
        lambda: hashes <= {event["mm_hash"] for event in pair.split.events("store.written")},
        "the pictures are stored",
    )
    forget(pair.split)
    begin_s = time.monotonic()
    for content, before in zip(CONTENTS, first, strict=True):
        answer = ask(pair.split.url, content)
        assert_brought(answer, content, "store", "encoder_cache")
        assert_equal(answer, before)
    assert not pair.split.events("encode.begin", since_s=begin_s)
    assert hashes <= {event["mm_hash"] for event in pair.split.events("store.loaded")}
    for content, answer in zip(CONTENTS, first, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))
