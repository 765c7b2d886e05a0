"""One encode and one prefill+decode instance in float32, for everything that such a pair must do.

Their room is short: a pool for four pictures of 112 x 112 pixels, a queue of a few items; and their
workers can be slowed and spoiled. What differs between modules lies in the router of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import (
    Pair,
    Split,
    every_instance_is_up,
    router_of,
    running,
)
from tests.e2e.engines import RESTART_S, both_serve, forget_items, wait_until
from tests.e2e.one_pair.limits import ITEM_BYTES, POOL_ITEMS, QUEUE, SEATS, STEP
from tests.forked import Popen


@pytest.fixture(scope="package")
def engines(fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    settings = [
        # Routers ask it in one module only.
        "store.kind=file",
        f"store.path={tmp_path_factory.mktemp('store')}",
        "store.timeout_ms=10000",
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
def router() -> dict[str, object]:
    """Settings of a module's router; a module that wants others defines it anew."""
    return {}


@pytest.fixture(scope="module")
def pair(
    engines: Split,
    router: dict[str, object],
    reference_url: str,
    fork: Popen,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Pair]:
    """The engines behind the module's own router, without an item of an earlier module."""
    # An earlier module may have killed one, which its router may not have seen yet.
    wait_until(lambda: both_serve(engines.pid), "both engines serve", within_s=RESTART_S)
    wait_until(lambda: every_instance_is_up(engines), "the router uses both", within_s=RESTART_S)
    forget_items(engines.pid)
    log = tmp_path_factory.mktemp("router") / f"{Path(str(request.path)).stem}.log"
    with router_of(engines, log, fork, **{"store": None, **router}) as split:
        yield Pair(split=split, reference_url=reference_url)
