"""The two ends of an item's way: what its encoder shall send, and what its PD instance expects."""

from __future__ import annotations

import uuid

from epd_portable.config.secret import Secret
from epd_portable.router.media import MediaItem
from epd_portable.router.pool import Instance
from epd_portable.wire.params import EncodedItem, EncodeTransfer, ExpectedTransfer


def new_transfer(item: MediaItem, pd: Instance, secret: Secret) -> EncodeTransfer:
    """Return a way of its own for an item, for whichever instance encodes it, with its proof."""
    transfer_id = uuid.uuid4().hex
    return EncodeTransfer(
        transfer_id=transfer_id,
        mm_hash=item.mm_hash,
        consumer=pd.control,
        modality=item.modality,
        proof=secret.vouch(transfer_id, item.mm_hash, pd.control),
    )


def expected_transfer(
    item: MediaItem, transfer_id: str, encoder: Instance, told: EncodedItem | None
) -> ExpectedTransfer:
    """Return what the PD instance may expect.

    Args:
        item: As the router calls it.
        transfer_id: Of the item's way.
        encoder: Instance that is asked first.
        told: What it says of the item, which then travels without its media and under the
            engine's own name; ``None`` with media.
    """
    return ExpectedTransfer(
        transfer_id=transfer_id,
        mm_hash=told.mm_hash if told else item.mm_hash,
        encoder=encoder.name,
        modality=item.modality,
        media=told is None,
    )
