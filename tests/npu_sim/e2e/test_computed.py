"""Engines on devices whose operators are late answer encode jobs when these are computed.

Both are on one device, and keep themselves to a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.asking import ask, ask_all, assert_equal, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair, encoders_held
from tests.e2e.engines import wait_until
from tests.npu_sim.e2e.conftest import simulated

pytestmark = pytest.mark.full

OPERATOR_US = 2000
PICTURES = 4
BURST = 16
"""Pictures of `BURST_PX`, with 256 embeddings each: eight of them are encoded together."""
BURST_PX = 448


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, reference_url: str) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("computed")
    # Operators are made late when they are loaded, so nothing is forked here.
    settings = [
        "transfer.path=ipc",
        "instances.encode.devices=[0]",
        "instances.prefill_decode.devices=[0]",
        'instances.encode.env.EPD_COMPUTE_SHARE="30"',
        'instances.prefill_decode.env.EPD_COMPUTE_SHARE="70"',
        f'instances.encode.env.ASCEND_SIM_OP_US="{OPERATOR_US}"',
        "instances.encode.engine_args.worker_cls=tests.e2e.workers.SlowEncodeWorker",
        "instances.encode.engine_args.enable_log_requests=true",
        # The whole burst would have room in a step.
        "instances.encode.engine_args.max_num_batched_tokens=8192",
    ]
    with simulated(folder, settings) as split:
        yield Pair(split=split, reference_url=reference_url)


def test_encode_jobs_end_after_computation_in_order(pair: Pair) -> None:
    contents = [[picture(seed), ASK] for seed in range(70, 70 + PICTURES)]
    for content, split in zip(contents, ask_all(pair.split.url, contents), strict=True):
        assert_equal(split, ask(pair.reference_url, content))
    ready = [event["t_s"] for event in pair.split.events("output.ready")]
    answered = [event["t_s"] for event in pair.split.events("encode.finished")]
    assert len(ready) == len(answered) == PICTURES
    for computed_s, answered_s in zip(ready, answered, strict=True):
        assert answered_s >= computed_s
    begun = [event["t_s"] for event in pair.split.events("encode.begin")]
    ended = [event["t_s"] for event in pair.split.events("encode.end")]
    assert len(begun) == len(ended)
    for begun_s, ended_s in zip(begun, ended, strict=True):
        assert ended_s - begun_s > 20 * OPERATOR_US / 1e6, "that is the time to queue it"
    writes = pair.split.events("transfer.written")
    assert len(writes) == PICTURES
    for write in writes:
        assert write["write_s"] < min(e - b for b, e in zip(begun, ended, strict=True))


def test_encoder_cache_takes_a_part_of_the_instances_memory(pair: Pair) -> None:
    (log,) = pair.split.log_dir.glob("encode-0*.log")
    left, filled = (
        int(re.search(pattern, log.read_text())[1])
        for pattern in (r"0\.4 leaves (\d+) MiB", r"encoder cache may fill (\d+) MiB")
    )
    assert 600 < left < 0.4 * 2048
    assert filled == pytest.approx(0.75 * left, abs=1)


@pytest.mark.parametrize(
    ("instance", "cores"), [("encode-0", (6, 12)), ("prefill_decode-0", (14, 28))]
)
def test_instance_stays_within_its_memory_share(
    pair: Pair, instance: str, cores: tuple[int, int]
) -> None:
    (log,) = pair.split.log_dir.glob(f"{instance}*.log")
    limit = "this process computes with {} cube cores, {} vector cores".format(*cores)
    assert limit in log.read_text()


def test_first_outputs_of_burst_leave_before_last_is_computed(pair: Pair) -> None:
    split = pair.since_now().split
    contents = [[picture(seed, BURST_PX), ASK] for seed in range(200, 201 + BURST)]
    (log,) = split.log_dir.glob("encode-0*.log")
    before = log.read_text().count("Added request")
    with ThreadPoolExecutor(len(contents)) as pool:
        with encoders_held(split):
            answers = [pool.submit(ask, split.url, contents[0])]
            wait_until(lambda: bool(split.events("encode.begin")), "the first is begun")
            answers += [pool.submit(ask, split.url, content) for content in contents[1:]]
            arrived = before + len(contents)
            wait_until(lambda: log.read_text().count("Added request") == arrived, "all have come")
        for answer in answers:
            assert answer.result().sources == ["transfer"]
    assert [len(event["items"]) for event in split.events("encode.begin")] == [1, 8, 8]
    ready = [event["t_s"] for event in split.events("output.ready")]
    assert ready[BURST // 2] < split.events("encode.end")[-1]["t_s"]
    last = ask(pair.reference_url, contents[-1])
    assert_equal(answers[-1].result(), last)
