"""What the PD side knows of a request's items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd_portable.runners.matching import engine_names
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
        modality: The engine's: ``image``, ``video`` or ``audio`` with most models.
        has_media: Whether the request holds the item's media, so that it can be encoded here.
    """

    input_id: int
    mm_hash: str
    begin: int
    end: int
    num_embeds: int
    tensor: TensorSpec
    modality: str = "image"
    has_media: bool = True


@dataclass(slots=True)
class RequestRecord:
    """One request with items.

    Attributes:
        request: The engine's own.
        items: In the order of the prompt.
        transfers: Of its items, by ``mm_hash``.
        reply_to: ZMQ identity of the router; empty if nobody wants to hear of failures.
        arrived_s: When it was added.
        bare: ``mm_hash`` of items that cannot be encoded here.
        awaited: ``mm_hash`` of items that another instance is to deliver.
        outcomes: How each item was had, by ``mm_hash``.
        mm_inputs_done: Items that lie wholly in what is computed, prefix cache included.
        failed: An item cannot be had; the scheduler ends the request.
    """

    request: MultiModalRequest
    items: Sequence[PromptItem]
    transfers: Mapping[str, ExpectedTransfer]
    reply_to: bytes
    arrived_s: float
    bare: frozenset[str] = frozenset()
    awaited: set[str] = field(default_factory=set)
    outcomes: dict[str, ItemOutcome] = field(default_factory=dict)
    mm_inputs_done: int = 0
    failed: bool = False

    @property
    def mm_inputs_total(self) -> int:
        """Number of items in the prompt, one that comes twice counted twice."""
        return len(self.items)

    def update_mm_inputs_done(self, num_computed_tokens: int) -> bool:
        """Count the items that lie wholly in what is computed; tell whether they became more."""
        done = sum(item.end <= num_computed_tokens for item in self.items)
        grew = done > self.mm_inputs_done
        self.mm_inputs_done = max(done, self.mm_inputs_done)
        return grew

    def covered(self, num_computed_tokens: int) -> set[str]:
        """Return the awaited items all of whose places lie in what is computed."""
        needed = {item.mm_hash for item in self.items if item.end > num_computed_tokens}
        return self.awaited - needed

    def note(self, outcome: ItemOutcome) -> None:
        """Remember how an item was had: the first way counts, unless it had to be encoded here."""
        if outcome.source == "local" or outcome.mm_hash not in self.outcomes:
            self.outcomes[outcome.mm_hash] = outcome


def bare_items(
    items: Sequence[PromptItem],
    transfers: Mapping[str, ExpectedTransfer],
    *,
    can_encode: bool,
) -> frozenset[str]:
    """Return the items of a request that this instance cannot encode.

    Args:
        items: Of the request.
        transfers: From `match_transfers`; what the router says of media counts, too.
        can_encode: Whether the instance holds the encoder.
    """
    without = {mm_hash for mm_hash, transfer in transfers.items() if not transfer.media}
    return frozenset(
        item.mm_hash
        for item in items
        if not (can_encode and item.has_media) or item.mm_hash in without
    )


def match_transfers(
    items: Sequence[PromptItem], params: PrefillParams | None
) -> dict[str, ExpectedTransfer]:
    """Return the transfer of each item by the engine's ``mm_hash``; see `engine_names`."""
    transfers = params.transfers if params is not None else ()
    names = engine_names(items, transfers)
    return {names[each.mm_hash]: each for each in transfers if each.mm_hash in names}
