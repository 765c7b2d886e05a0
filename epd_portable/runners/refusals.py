"""PD scheduler: requests that cannot be answered, encoders that cannot deliver, and who hears."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from epd_portable.connector.events import Refused
from epd_portable.connector.pool import ReceivePool
from epd_portable.runners.prompt import PromptItem, RequestRecord
from epd_portable.runners.receiver_metrics import ReceiverMetrics
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.wire.messages import AnyMessage, Nack, NackCode

logger = logging.getLogger(__name__)


def too_large(
    item: PromptItem, instance: str, cache: EncoderCacheManager, pool: ReceivePool
) -> str:
    """Return why an instance can never receive an item."""
    return (
        f"an item of this request needs {item.num_embeds} encoder embeddings in "
        f"{item.tensor.nbytes} bytes; {instance} receives at most "
        f"{cache.cache_size} embeddings and {pool.capacity_bytes} bytes: "
        "send a smaller picture, or raise transfer.pool_bytes"
    )


class Refusals:
    """Requests for the scheduler to end, each reported once to the router that sent it.

    Args:
        send: Sends a control message to a ZMQ identity.
        metrics: Counts them.
    """

    def __init__(self, send: Callable[[bytes, AnyMessage], None], metrics: ReceiverMetrics) -> None:
        self._send = send
        self._metrics = metrics
        self._waiting: set[str] = set()

    def add(
        self, request_id: str, record: RequestRecord, mm_hash: str, code: NackCode, detail: str
    ) -> None:
        """Let the scheduler end a request, and tell the router by one of its own transfers.

        Args:
            request_id: The request.
            record: Its record; one that has failed already stays as it is.
            mm_hash: The item that cannot be had.
            code: Why, for the router.
            detail: Why, for people: value, limit and remedy.
        """
        if record.failed:
            return
        record.failed = True
        self._metrics.request_failed(code)
        self._waiting.add(request_id)
        if record.transfers:
            transfer = record.transfers.get(mm_hash) or next(iter(record.transfers.values()))
            self._tell(record, transfer.transfer_id, code, detail)

    def of_encoder(self, records: Iterable[RequestRecord], refused: Refused) -> None:
        """Tell the routers whose transfer it is, which may ask another encoder.

        Args:
            records: Of all requests.
            refused: The encoder cannot deliver.
        """
        for record in records:
            transfer = record.transfers.get(refused.mm_hash)
            if transfer is not None and transfer.transfer_id == refused.transfer_id:
                self._tell(record, refused.transfer_id, refused.code, refused.reason)

    def add_lost(self, request_id: str, record: RequestRecord, mm_hash: str, problem: str) -> None:
        """End a request that needs an item which cannot be encoded here; it may be sent again.

        Args:
            request_id: The request.
            record: Its record.
            mm_hash: The item.
            problem: Why it does not come from elsewhere.
        """
        detail = (
            f"item {mm_hash}: {problem}; it cannot be encoded here, where the request holds no "
            "media or the instance no encoder: send the request again"
        )
        logger.warning("request %s: %s", request_id, detail)
        self.add(request_id, record, mm_hash, NackCode.UNAVAILABLE, detail)

    def take(self) -> set[str]:
        """Return the requests to end since the last call."""
        waiting, self._waiting = self._waiting, set()
        return waiting

    def _tell(self, record: RequestRecord, transfer_id: str, code: NackCode, detail: str) -> None:
        if record.reply_to:
            nack = Nack(transfer_id=transfer_id, code=code, detail=detail)
            self._send(record.reply_to, nack)
