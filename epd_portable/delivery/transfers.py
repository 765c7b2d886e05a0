"""What encode and PD instance are told of an item's way from one to the other."""

from __future__ import annotations

import uuid

from epd_portable.config.secret import Secret
from epd_portable.delivery.assignment import RequestItem
from epd_portable.wire.params import EncodedItem, EncodeTransfer, ExpectedTransfer


def new_transfer(item: RequestItem, consumer: str, secret: Secret) -> EncodeTransfer:
    """Return a way of its own for an item, whichever instance encodes it, with its proof.

    Args:
        item: The item.
        consumer: Control address of the PD instance.
        secret: Of the deployment.
    """
    transfer_id = uuid.uuid4().hex
    return EncodeTransfer(
        transfer_id=transfer_id,
        item_uuid=item.item_uuid,
        consumer=consumer,
        modality=item.modality,
        proof=secret.sign_transfer(transfer_id, item.item_uuid, consumer),
    )


def expected_transfer(
    transfer: EncodeTransfer,
    encoder: str = "",
    metadata: EncodedItem | None = None,
    store: str = "",
) -> ExpectedTransfer:
    """Return what the PD instance may expect.

    Args:
        transfer: The item's way.
        encoder: Name of the instance that is asked first.
        metadata: What it says of the item, which then travels without its media and under the
            engine's own name; ``None`` with media.
        store: Key of its entry, if the store has it.
    """
    return ExpectedTransfer(
        transfer_id=transfer.transfer_id,
        item_uuid=metadata.mm_hash if metadata else transfer.item_uuid,
        encoder=encoder,
        modality=transfer.modality,
        media=metadata is None,
        store=store,
    )
