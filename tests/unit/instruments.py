"""Everything that an instance counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase
from starlette.types import Receive, Scope, Send

from epd_portable.connector.stores.metrics import StoreMetrics
from epd_portable.runners.metrics import ReceiverMetrics, SenderMetrics
from epd_portable.scheduling.admission import AdmissionLimits
from epd_portable.vllm_plugin.admission import AdmissionMiddleware


def instruments_of(owner: object) -> list[MetricWrapperBase]:
    """Return the metrics that an object holds."""
    return [each for each in vars(owner).values() if isinstance(each, MetricWrapperBase)]


def of_an_instance() -> Iterator[MetricWrapperBase]:
    """Yield the metrics of workers and stores."""
    registry = CollectorRegistry()
    for owner in (
        *(made(registry) for made in (ReceiverMetrics, SenderMetrics)),
        *(StoreMetrics(side, registry) for side in ("pd", "encode")),
    ):
        yield from instruments_of(owner)


def of_admission() -> Sequence[Metric]:
    """Return what an API server's limits count."""

    async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("never called")

    limits = AdmissionLimits(items=1, nbytes=1)
    return list(AdmissionMiddleware(no_app, limits=limits, registry=CollectorRegistry()).collect())
