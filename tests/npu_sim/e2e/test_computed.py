"""Engines on devices whose operators are late answer encode jobs when these are computed.

Both are on one device, and keep themselves to a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import ask, ask_all, assert_equal, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair
from tests.e2e.equality import TOLERANCE
from tests.npu_sim.e2e.conftest import simulated

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.needs_vllm,
    pytest.mark.timeout(900),
]

OPERATOR_US = 2000
PICTURES = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, reference_url: str) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("computed")
    # Operators are made late when they are loaded, so nothing is forked here.
    settings = [
        "transfer.path=ipc",
        "instances.encode.devices=[0]",
        "instances.prefill_decode.devices=[0]",
        "instances.encode.share=30",
        "instances.prefill_decode.share=70",
        f'instances.encode.env.ASCEND_SIM_OP_US="{OPERATOR_US}"',
    ]
    with simulated(folder, settings) as split:
        yield Pair(split=split, reference_url=reference_url)


def test_encode_jobs_are_answered_behind_the_computation_and_in_its_order(pair: Pair) -> None:
    contents = [[picture(seed), ASK] for seed in range(70, 70 + PICTURES)]
    for content, split in zip(contents, ask_all(pair.split.url, contents), strict=True):
        assert_equal(split, ask(pair.reference_url, content), tolerance=TOLERANCE)
    ready = [event["t_s"] for event in pair.split.events("output.ready")]
    answered = [event["t_s"] for event in pair.split.events("encode.answered")]
    assert len(ready) == len(answered) == PICTURES
    for computed_s, answered_s in zip(ready, answered, strict=True):
        assert answered_s >= computed_s
    begun = [event["t_s"] for event in pair.split.events("encode.begin")]
    ended = [event["t_s"] for event in pair.split.events("encode.end")]
    assert len(begun) == len(ended)
    for begun_s, ended_s in zip(begun, ended, strict=True):
        assert ended_s - begun_s > 20 * OPERATOR_US / 1e6, "that is the time to queue it"
    for write in pair.split.events("transfer.written"):
        assert write["write_s"] < min(e - b for b, e in zip(begun, ended, strict=True))


def test_the_encoder_cache_fills_a_part_of_what_the_device_has_for_its_instance(
    pair: Pair,
) -> None:
    (log,) = pair.split.log_dir.glob("encode-0*.log")
    left, filled = (
        int(re.search(pattern, log.read_text())[1])  # type: ignore[index]
        for pattern in (r"0\.4 leaves (\d+) MiB", r"encoder cache may fill (\d+) MiB")
    )
    assert 600 < left < 0.4 * 2048
    assert filled == pytest.approx(0.75 * left, abs=1)


@pytest.mark.parametrize(
    ("instance", "cores"), [("encode-0", (6, 12)), ("prefill_decode-0", (14, 28))]
)
def test_each_instance_keeps_itself_to_its_share(
    pair: Pair, instance: str, cores: tuple[int, int]
) -> None:
    (log,) = pair.split.log_dir.glob(f"{instance}*.log")
    limit = "this process computes with {} cube cores, {} vector cores".format(*cores)
    assert limit in log.read_text()
