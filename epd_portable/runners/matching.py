"""Which transfer is of which item, where the engine calls it by another name than the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Named(Protocol):
    """An item or a transfer.

    Attributes:
        mm_hash: Its name: an item's is the engine's, a transfer's the one that the router gave.
        modality: What the item is to the model, such as ``image``.
    """

    @property
    def mm_hash(self) -> str: ...  # noqa: D102 - above
    @property
    def modality(self) -> str: ...  # noqa: D102 - above


def engine_names(items: Sequence[Named], transfers: Sequence[Named]) -> dict[str, str]:
    """Return the engine's names of the transfers' items, by the router's names.

    Mostly they are the same. Where a request has settings for a modality, the engine derives names
    of its own; within a modality it keeps the order in which the request has the items, so these
    are matched by it. Where the numbers differ, none of that modality are: one video can be two
    items, pictures and sound.

    Args:
        items: Of a prompt, in its order; repeated ones count once.
        transfers: In the order of the request; several can be of one item.
    """
    known = {item.mm_hash for item in items}
    names = {each.mm_hash: each.mm_hash for each in transfers if each.mm_hash in known}
    for modality in {item.modality for item in items}:
        ours = _unnamed(items, modality, names)
        theirs = _unnamed(transfers, modality, names)
        if len(ours) == len(theirs):
            names.update(zip(theirs, ours, strict=True))
    return names


def _unnamed(every: Sequence[Named], modality: str, names: dict[str, str]) -> list[str]:
    found = (each.mm_hash for each in every if each.modality == modality)
    return [name for name in dict.fromkeys(found) if name not in names]
