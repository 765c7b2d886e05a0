"""What an encode instance counts of transfers and of the outputs that it keeps."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from epd_portable.connector.producer import Finished
from epd_portable.runners.metrics import SenderMetrics
from tests.unit.runners.harness import counted


def test_transfers_are_counted_by_where_outputs_come_from_and_how_they_end() -> None:
    registry = CollectorRegistry()
    metrics = SenderMetrics(registry)
    metrics.submitted("encoder")
    metrics.finished(Finished(transfer_id="t", mm_hash="cat"))
    metrics.submitted("host")
    assert counted(registry) == {
        "epd_encode_transfers_total{source=encoder}": 1,
        "epd_encode_transfers_total{source=host}": 1,
        "epd_encode_transfers_ended_total{result=settled}": 1,
        "epd_encode_transfers_in_flight": 1,
    }
    metrics.finished(Finished(transfer_id="t", mm_hash="cat", problem="gone"))
    assert counted(registry)["epd_encode_transfers_ended_total{result=failed}"] == 1
    assert "epd_encode_transfers_in_flight" not in counted(registry)


def test_outputs_are_kept_and_given_up_by_their_bytes() -> None:
    registry = CollectorRegistry()
    metrics = SenderMetrics(registry)
    metrics.kept(64)
    metrics.kept(32)
    metrics.kept(-64)
    assert counted(registry) == {"epd_encode_kept_bytes": 32}
