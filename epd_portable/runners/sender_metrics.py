"""What an encode instance counts; each is listed in ``docs/metrics.md``."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry

from epd_portable.connector.producer import Finished, Write
from epd_portable.runners.instruments import Instruments
from epd_portable.wire.messages import Announce, AnyMessage, Written

OutputSource = Literal["encoder", "cache", "host"]
"""Where an output comes from: it is computed now, it is in the encoder cache, or its copy in host
memory was restored."""


class SenderMetrics(Instruments):
    """Of the worker's process. `sent` and `finished` are for one thread."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        counter = self._counter
        self._sent: set[tuple[str, str]] = set()
        self._transfers = counter(
            "epd_encode_transfers",
            "Transfers begun, by where the output comes from.",
            "source",
            ("encoder", "cache", "host"),
        )
        self._ended = counter(
            "epd_encode_transfers_ended",
            "Transfers that ended: the consumer has the item or does not need it, or it failed.",
            "result",
            ("settled", "failed"),
        )
        self._announcements = counter("epd_encode_announcements", "Items announced.")
        self._repeats = counter(
            "epd_encode_repeats",
            "Messages sent again: no answer, no room yet, or a lease to renew.",
            "message",
            ("announce", "written"),
        )
        self._writes = counter("epd_encode_writes", "Items written into slots.", "path")
        self._sent_bytes = counter("epd_encode_sent_bytes", "Bytes of these items.", "path")
        self._write_failures = counter("epd_encode_write_failures", "Writes that failed.", "path")
        self._write_s = self._seconds(
            "epd_encode_write_seconds", "Duration of the writes that did not fail.", "path"
        )
        self._in_flight = self._gauge(
            "epd_encode_transfers_in_flight", "Transfers that have not ended."
        )
        self._kept_bytes = self._gauge(
            "epd_encode_kept_bytes", "Bytes of encoder outputs kept for transfers."
        )

    def submitted(self, source: OutputSource) -> None:
        """A transfer began of an output that is encoded now, or was there already."""
        self._transfers.labels(source).inc()
        self._in_flight.inc()

    def sent(self, message: AnyMessage) -> None:
        """A message goes to a consumer."""
        if isinstance(message, Announce):
            kind = "announce"
        elif isinstance(message, Written):
            kind = "written"
        else:
            return
        name = (message.transfer_id, kind)
        if name in self._sent:
            self._repeats.labels(kind).inc()
        elif kind == "announce":
            self._announcements.inc()
        self._sent.add(name)

    def written(self, write: Write, write_s: float) -> None:
        """An item is in its slot, after so many seconds."""
        self._writes.labels(write.path).inc()
        self._sent_bytes.labels(write.path).inc(write.slot.nbytes)
        self._write_s.labels(write.path).observe(write_s)

    def write_failed(self, write: Write) -> None:
        """A write ended with an error."""
        self._write_failures.labels(write.path).inc()

    def finished(self, finished: Finished) -> None:
        """A transfer ended."""
        self._ended.labels("failed" if finished.problem else "settled").inc()
        self._in_flight.dec()
        self._sent -= {(finished.transfer_id, kind) for kind in ("announce", "written")}

    def kept(self, nbytes: int) -> None:
        """Outputs of so many bytes are kept from now on; negative: not any more."""
        self._kept_bytes.inc(nbytes)
