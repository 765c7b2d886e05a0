"""A request's items: as the engine names and places them, and where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd_portable.items.table import PromptItem
from epd_portable.wire.params import (
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
)


def metadata_only_items(
    items: Sequence[PromptItem],
    transfers: Mapping[str, ExpectedTransfer],
    *,
    can_encode: bool,
) -> frozenset[str]:
    """Return the items of a request that this instance cannot encode.

    Args:
        transfers: From `match_transfers`; media that the front reports count, too.
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
    names = engine_names([(item.mm_hash, item.modality) for item in items], transfers)
    return {names[each.item_uuid]: each for each in transfers if each.item_uuid in names}


def engine_names(
    items: Sequence[tuple[str, str]], transfers: Sequence[EncodeTransfer | ExpectedTransfer]
) -> dict[str, str]:
    """Return the engine's identifiers of the transfers' items, by ``item_uuid``.

    Mostly they are the same. Where a request has settings for a modality, the engine derives names
    of its own; within a modality it keeps the order in which the request has the items, so these
    are matched by it. Where the numbers differ, none of that modality are: one video can be two
    items, images and sound.

    Args:
        items: ``(identifier, modality)`` of those in a prompt, in its order.
        transfers: In the order of the request; several can be of one item.
    """
    known = {identifier for identifier, _ in items}
    routed = [(each.item_uuid, each.modality) for each in transfers]
    names = {item_uuid: item_uuid for item_uuid, _ in routed if item_uuid in known}
    for wanted in {modality for _, modality in items}:
        ours, theirs = (
            [
                name
                for name, modality in dict.fromkeys(side)
                if modality == wanted and name not in names
            ]
            for side in (items, routed)
        )
        if len(ours) == len(theirs):
            names.update(zip(theirs, ours, strict=True))
    return names
