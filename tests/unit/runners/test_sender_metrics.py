"""What an encode instance counts of the messages that it sends, and of transfers that end."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from epd_portable.connector.producer import Finished
from epd_portable.runners.metrics import SenderMetrics
from epd_portable.wire.messages import Abort, Announce, Written
from tests.unit.builders import peer
from tests.unit.runners.harness import counted, spec

ANNOUNCE = Announce(transfer_id="t", mm_hash="cat", tensor=spec(2), producer=peer("encode-0"))
WRITTEN = Written(transfer_id="t", generation=1)


def test_the_first_of_each_message_is_no_repeat_and_a_new_transfer_begins_anew() -> None:
    registry = CollectorRegistry()
    metrics = SenderMetrics(registry)
    metrics.submitted("encoder")
    for message in (ANNOUNCE, ANNOUNCE, WRITTEN, ANNOUNCE, WRITTEN):
        metrics.sent(message)
    metrics.sent(Abort(transfer_id="t", reason=""))
    metrics.finished(Finished(transfer_id="t", mm_hash="cat"))
    metrics.submitted("host")
    metrics.sent(ANNOUNCE)
    assert counted(registry) == {
        "epd_encode_transfers_total{source=encoder}": 1,
        "epd_encode_transfers_total{source=host}": 1,
        "epd_encode_announcements_total": 2,
        "epd_encode_repeats_total{message=announce}": 2,
        "epd_encode_repeats_total{message=written}": 1,
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
