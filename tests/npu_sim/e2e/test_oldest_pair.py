"""Smoke of the front by `tcp` on older pairs of vLLM and vllm-ascend, above all 0.23.0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import ask, assert_equal, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import ENGINE_MODULES, ROOT, Pair, forking
from tests.npu_sim.e2e.conftest import DEVICES, simulated

pytestmark = pytest.mark.full
PAIRS = Path(sys.prefix) / "pairs"


@pytest.fixture(scope="module", params=["0.23", "0.26"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference_url: str
) -> Iterator[Pair]:
    older = PAIRS / request.param
    assert (older / "vllm").is_dir(), f"{older} is not there: make npu-sim"
    folder = tmp_path_factory.mktemp("older")
    env = {"PYTHONPATH": os.pathsep.join((str(older), str(ROOT)))}
    with (
        forking(ENGINE_MODULES, {**DEVICES, **env}) as popen,
        simulated(folder, ["transfer.path=tcp"], env=env, popen=popen) as split,
    ):
        yield Pair(split=split, reference_url=reference_url)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_image_is_transferred_and_response_equals_one_process(pair: Pair, seed: int) -> None:
    content = [picture(seed), ASK]
    split = ask(pair.split.url, content)
    assert_equal(split, ask(pair.reference_url, content))
    assert [(item["source"], item["path"]) for item in split.items] == [("transfer", "tcp")]
