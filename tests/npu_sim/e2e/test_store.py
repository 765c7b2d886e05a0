"""Encoder outputs of simulated devices are stored, and loaded into simulated devices again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.asking import Answer, ask, assert_equal
from tests.e2e.conftest import Pair
from tests.e2e.engines import forget_items, wait_until
from tests.e2e.one_pair.test_store import CONTENTS, check_all_from_store
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import simulated

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["collective", "ipc"])
def pair(
    request: pytest.FixtureRequest,
    npu_fork: Popen,
    tmp_path_factory: pytest.TempPathFactory,
    reference_url: str,
) -> Iterator[Pair]:
    """One whose slots are in host memory, and one whose slots are on the device."""
    folder = tmp_path_factory.mktemp("store")
    settings = [
        f"transfer.path={request.param}",
        "store.kind=file",
        f"store.path={folder / 'outputs'}",
    ]
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with simulated(folder, settings, env=env, popen=npu_fork) as split:
        yield Pair(split=split, reference_url=reference_url)


def test_pictures_that_devices_have_forgotten_come_from_the_store(pair: Pair) -> None:
    first: list[Answer] = [ask(pair.split.url, content) for content in CONTENTS]
    hashes = {item["mm_hash"] for answer in first for item in answer.items}
    wait_until(
        lambda: hashes <= {event["mm_hash"] for event in pair.split.events("store.written")},
        "the pictures are stored",
    )
    forget_items(pair.split.pid)
    check_all_from_store(pair.split, first)
    assert hashes <= {event["mm_hash"] for event in pair.split.events("store.loaded")}
    for content, answer in zip(CONTENTS, first, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))
