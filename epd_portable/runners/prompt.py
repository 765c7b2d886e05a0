"""What the PD side knows of a request's items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd_portable.scheduling.encoder_cache import MultiModalRequest
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import ExpectedTransfer, ItemOutcome, PrefillParams


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """One place of an item in a prompt.

    Attributes:
        input_id: Index in the request's ``mm_features``.
        mm_hash: The engine's identifier.
        begin: First prompt token of the item.
        end: One past its last.
        num_embeds: Embeddings that the encoder puts out for it.
        tensor: Shape and dtype of that output.
    """

    input_id: int
    mm_hash: str
    begin: int
    end: int
    num_embeds: int
    tensor: TensorSpec


@dataclass(slots=True)
class RequestRecord:
    """One request with items.

    Attributes:
        request: The engine's own.
        items: In the order of the prompt.
        transfers: Of its items, by ``mm_hash``.
        reply_to: ZMQ identity of the router; empty if nobody wants to hear of failures.
        arrived_s: When it was added.
        awaited: ``mm_hash`` of items that another instance is to deliver.
        outcomes: How each item was had, by ``mm_hash``.
        failed: An item cannot be had; the scheduler ends the request.
    """

    request: MultiModalRequest
    items: Sequence[PromptItem]
    transfers: Mapping[str, ExpectedTransfer]
    reply_to: bytes
    arrived_s: float
    awaited: set[str] = field(default_factory=set)
    outcomes: dict[str, ItemOutcome] = field(default_factory=dict)
    failed: bool = False

    def note(self, outcome: ItemOutcome) -> None:
        """Remember how an item was had: the first way counts, unless it had to be encoded here."""
        if outcome.source == "local" or outcome.mm_hash not in self.outcomes:
            self.outcomes[outcome.mm_hash] = outcome


def match_transfers(
    items: Sequence[PromptItem], params: PrefillParams | None
) -> dict[str, ExpectedTransfer]:
    """Return the transfer of each item by the engine's ``mm_hash``.

    By hash; where the engine derived identifiers of its own (processor settings in the request),
    by order.
    """
    if params is None:
        return {}
    distinct = list(dict.fromkeys(item.mm_hash for item in items))
    named = {transfer.mm_hash: transfer for transfer in params.transfers}
    if any(mm_hash in named for mm_hash in distinct):
        return {mm_hash: named[mm_hash] for mm_hash in distinct if mm_hash in named}
    return dict(zip(distinct, params.transfers, strict=False))
