"""In bfloat16, the dtype of real checkpoints, by shared memory of the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.asking import ask, assert_brought, assert_close
from tests.e2e.cases import SINGLE
from tests.e2e.conftest import Pair, reference
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import simulated

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def pair(fork: Popen, npu_fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("bfloat16")
    popen = npu_fork
    with (
        reference(folder, fork, dtype="bfloat16") as one_process,
        simulated(folder, ["transfer.path=shm"], dtype="bfloat16", popen=popen) as split,
    ):
        yield Pair(split=split, reference_url=one_process.url)


@pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
def test_an_answer_is_as_likely_as_that_of_one_process(pair: Pair, content: Any) -> None:
    split = ask(pair.split.url, content)
    assert_close(split, ask(pair.reference_url, content))
    assert {item["path"] for item in split.items} <= {"shm"}
    assert_brought(split, content, "transfer")
