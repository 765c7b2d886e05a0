"""Two encoders and one prefill+decode instance, encrypted as between hosts.

In bfloat16, the dtype of real checkpoints, over ``tcp``,
with items that may come before their requests. Only 127.0.0.1 counts as this host, so 127.0.0.2
stands for an address of a network.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.collector import Collector, collecting
from tests.e2e.conftest import Pair, running
from tests.e2e.two_encoders.deployment import (
    OFF_HOST,
    QUEUE,
    Deployment,
    connections,
    epd_launch,
)
from tests.forked import Popen


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="package")
def deployment(
    fork: Popen,
    tmp_path_factory: pytest.TempPathFactory,
    collector: Collector,
    reference_url: str,
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    secret_file = folder / "secret"
    made = epd_launch("secret", str(secret_file))
    assert made.returncode == 0, made.stderr
    settings = [
        "instances.encode.count=2",
        f"instances.encode.max_queued_items={QUEUE}",
        "instances.encode.engine_args.worker_cls=tests.e2e.workers.SlowEncodeWorker",
        "transfer.path=tcp",
        "transfer.wait_timeout_s=120",
        "transfer.lease_s=60",
        f"launch.host={OFF_HOST}",
        f"router.tracing.endpoint={collector.endpoint}",
        f"secret_file={secret_file}",
        "front=router",
    ]
    with running(folder, settings, popen=fork) as split:
        pair = Pair(split=split, reference_url=reference_url)
        yield Deployment(pair=pair, secret_file=secret_file, opened=connections(split))
