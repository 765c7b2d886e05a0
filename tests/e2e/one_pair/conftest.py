"""Pair of an encode and a prefill+decode engine in float32, for all duties of such a pair.

Their room is short: a pool for four images of 112 x 112 pixels, a queue of a few items; and their
workers can be slowed and spoiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Pair, Split, every_instance_is_up, forget, running
from tests.e2e.engines import RESTART_S, wait_until
from tests.e2e.one_pair.limits import ITEM_BYTES, POOL_ITEMS, QUEUE, SEATS, STEP
from tests.forked import Popen


@pytest.fixture(scope="package")
def engines(fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    settings = [
        "engine_args.dtype=float32",
        f"transfer.pool_bytes={POOL_ITEMS * ITEM_BYTES}",
        # Beside other work; a test waits for the lease to end.
        "transfer.wait_timeout_s=120",
        "transfer.lease_s=8",
        f"instances.encode.max_queued_items={QUEUE}",
        f"instances.encode.engine_args.max_num_batched_tokens={STEP}",
        "instances.encode.engine_args.worker_cls=tests.e2e.workers.SlowEncodeWorker",
        f"instances.prefill_decode.engine_args.max_num_seqs={SEATS}",
        "instances.prefill_decode.engine_args.worker_cls=tests.e2e.workers.SteeredPDWorker",
        "env.VLLM_SERVER_DEV_MODE='1'",
    ]
    with running(tmp_path_factory.mktemp("engines"), settings, popen=fork) as split:
        yield split


@pytest.fixture(scope="module")
def pair(engines: Split, reference_url: str) -> Pair:
    """The engines, without an item of an earlier module."""
    # An earlier module may have killed one.
    wait_until(lambda: every_instance_is_up(engines), "both engines are up", within_s=RESTART_S)
    forget(engines)
    return Pair(split=engines, reference_url=reference_url).since_now()
