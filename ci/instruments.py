"""Metrics of engines, front and gateway, without a process of any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase

from epd_portable.front.metrics import FrontMetrics, InstanceCollector
from epd_portable.items.metrics import ConsumerMetrics, SenderMetrics
from epd_portable.placement.instances import EndpointPool, EngineSettings
from epd_portable.transfer.stores.metrics import StoreMetrics


def instruments_of(owner: object) -> list[MetricWrapperBase]:
    """Return the metrics that an object holds."""
    return [each for each in vars(owner).values() if isinstance(each, MetricWrapperBase)]


def of_a_generating_engine() -> Iterator[MetricWrapperBase]:
    """Yield the metrics of an engine that receives items."""
    registry = CollectorRegistry()
    for owner in (ConsumerMetrics(registry), StoreMetrics("pd", registry)):
        yield from instruments_of(owner)


def of_an_encode_engine() -> Iterator[MetricWrapperBase]:
    """Yield the metrics of an engine that encodes items."""
    registry = CollectorRegistry()
    for owner in (SenderMetrics(registry), StoreMetrics("encode", registry)):
        yield from instruments_of(owner)


def of_an_instance() -> Iterator[MetricWrapperBase]:
    """Yield the metrics of all engines."""
    yield from of_a_generating_engine()
    yield from of_an_encode_engine()


def of_the_front() -> Iterator[MetricWrapperBase]:
    """Yield the metrics that the front counts."""
    metrics = FrontMetrics(EndpointPool())
    for owner in (metrics, metrics.admission, StoreMetrics("front")):
        yield from instruments_of(owner)


def of_the_pool() -> Iterable[Metric]:
    """Return the metrics of the front's engines, with one compared engine and one item of work."""
    pool = EndpointPool()
    pool.add(EngineSettings(name="encode-0", role="encode")).output_difference = 0.001
    pool.work.came_s["encode", "image", 9] = 1.0
    return InstanceCollector(pool.seen).collect()
