"""Every choice for one try of a request: who answers, who prefills, who encodes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd_portable.config.roles import TAKES_ITEMS, TAKES_KV
from epd_portable.config.secret import Secret
from epd_portable.delivery.elastic import EncodeTimes, count_local_first
from epd_portable.delivery.fallbacks import RequestFailure, RequestPhase
from epd_portable.delivery.instances import EndpointPool, Instance
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.delivery import (
    Delivery,
    Forwarder,
    RequestPlan,
    from_store,
    new_transfer,
)
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.observability.record import RequestRecord
from epd_portable.router.prefill import where
from epd_portable.router.selector import Selection
from epd_portable.router.settings import RouterSettings
from epd_portable.router.store import StoredItem
from epd_portable.wire.outcomes import FailureKind


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One request between its tries.

    Attributes:
        call: What the next try asks.
        selection: Who gets what of it.
        record: Of it.
        stored: Items that need not be encoded.
        metadata_only: Encoders' metadata go in place of media, where the model allows it.
        tried: PD instances that failed it.
        prefills: Prefill instances that did, and ``""`` for those that are not to be asked.
        lost: The last of ``tried`` broke its connection, and may be well.
    """

    call: Call
    selection: Selection
    record: RequestRecord
    stored: Mapping[str, StoredItem]
    metadata_only: bool
    tried: list[str] = field(default_factory=list)
    prefills: list[str] = field(default_factory=list)
    lost: bool = False


class Planner:
    """Plans the tries of requests.

    Args:
        settings: Of the router.
        instances: Those that are there.
        times: How long items take encoders.
        metrics: Count what is chosen.
        secret: Signs transfers.

    Attributes:
        without_metadata: Modalities that encoders cannot describe, with this model.
        without_kv: Endpoints at which engines say nothing of KV.
    """

    def __init__(
        self,
        settings: RouterSettings,
        instances: EndpointPool,
        times: EncodeTimes,
        metrics: Metrics,
        secret: Secret,
    ) -> None:
        self.without_metadata: set[str] = set()
        self.without_kv: set[str] = set()
        self._settings = settings
        self._instances = instances
        self._times = times
        self._metrics = metrics
        self._secret = secret
        self._elastic = (
            settings.elastic_encode and settings.local_encode and settings.media == "concurrent"
        )

    def plan(self, forwarder: Forwarder, state: RequestState) -> RequestPlan:
        """Choose who answers, who prefills, and an encoder for every item.

        ``forwarder`` chooses who answers. With no other PD instance, one that was lost may be asked
        again.

        Raises:
            RequestFailure: There is no PD instance; or items go as metadata only, and one has no
                encoder.
        """
        pd = forwarder.choose(state.selection, state.tried)
        if pd is None and state.lost:
            pd = forwarder.choose(state.selection, ())
        if pd is None:
            raise RequestFailure(FailureKind.UNAVAILABLE, RequestPhase.ANSWER, self._why_no_pd())
        if pd.role not in TAKES_KV or not state.call.fields:
            return self._plan_items(state, pd)
        chosen, reason = where(
            state.call,
            state.selection,
            pd,
            state.prefills,
            without=self.without_kv,
        )
        self._metrics.prefills.labels(reason).inc()
        if reason == "unavailable":
            state.record.fall_back(RequestPhase.PREFILL, FailureKind.UNAVAILABLE)
        if chosen is None:
            return self._plan_items(state, pd)
        return RequestPlan(pd=pd, prefill=self._plan_items(state, chosen))

    def _plan_items(self, state: RequestState, pd: Instance) -> RequestPlan:
        """Choose an encoder for every item that the store has not, if an instance takes any.

        Raises:
            RequestFailure: Items go as metadata only, and one has no encoder.
        """
        call, selection, record = state.call, state.selection, state.record
        if pd.role not in TAKES_ITEMS:
            for item in call.items:
                record.end_item(item, "local_first")
            return RequestPlan(pd=pd)

        def as_metadata(item: MediaItem) -> bool:
            return state.metadata_only and self.goes_as_metadata(item)

        found = from_store(call, state.stored, pd, self._secret, as_metadata)
        others = [item for item in call.items if item.item_uuid not in found]
        items = selection.items_to_encode(others, pd)
        encoders = selection.choose_encoders(items)
        here, here_s = self._encoded_here(items, encoders, record, pd)
        for item in others if len(items) < len(others) else ():
            if item not in items:
                record.end_item(item, "local_first")
                here_s += self._times.of(item)
        for item, encoder in zip(items[here:], encoders[here:], strict=True):
            if encoder is None and as_metadata(item):
                missing = [item.item_uuid]
                message = "no encoder is healthy; try again later"
                raise RequestFailure(
                    FailureKind.MISSING, RequestPhase.ANSWER, message, items=missing
                )
            if encoder is None and not self._instances.of_duty("encode"):
                record.end_item(item, "local_first")
                continue
            if encoder is None:
                record.end_item(item, "local")
                record.fall_back(RequestPhase.ENCODE, FailureKind.UNAVAILABLE)
                continue
            transfer = new_transfer(item, pd, self._secret)
            job = call.for_encoder(item, transfer)
            found[item.item_uuid] = Delivery(
                item=item,
                transfer=transfer,
                encoder=encoder,
                body=job,
                metadata_only=as_metadata(item),
            )
        ordered = [found[item.item_uuid] for item in call.items if item.item_uuid in found]
        return RequestPlan(pd=pd, deliveries=tuple(ordered), here_s=here_s)

    def _encoded_here(
        self,
        items: Sequence[MediaItem],
        encoders: Sequence[Instance | None],
        record: RequestRecord,
        pd: Instance,
    ) -> tuple[int, float]:
        """Return how many of the first items the PD instance encodes by choice, and their time."""
        asked = [encoder for encoder in encoders if encoder is not None]
        if not self._elastic or not items or len(asked) < len(items):
            return 0, 0.0
        times_s = [self._times.of(item) for item in items]
        threshold = self._settings.elastic_threshold
        count, reason = count_local_first(times_s, asked, pd, threshold=threshold)
        for item in items[:count]:
            record.end_item(item, "local_first")
            self._metrics.elastic.labels(reason).inc()
        return count, sum(times_s[:count])

    def goes_as_metadata(self, item: MediaItem) -> bool:
        """Return whether an item is tried without its media first."""
        if self._settings.media != "metadata":
            return False
        return not self._settings.local_encode or item.modality not in self.without_metadata

    def _why_no_pd(self) -> str:
        states = "; ".join(
            f"{each.name}: {each.reason or each.state}"
            for each in self._instances.of_duty("answer")[:8]
        )
        return f"no prefill+decode instance can serve ({states or 'none is there'})"
