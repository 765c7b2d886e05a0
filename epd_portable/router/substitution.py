"""Messages whose media are replaced by what an encoder said of them, or get other names. Pure.

The engine keeps what its front end made of an item under the item's name. Made from metadata
alone, it holds no pixels, and no later request with the media would bring them: the media of an
item whose metadata an instance may have seen go to it under a name of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from epd_portable.router.media import MediaItem, Part
from epd_portable.wire.params import EncodedItem

MEDIA_SUFFIX = "-media"
"""What is added to an item's name when its media are sent after its metadata."""


def replace_media(messages: Iterable[object], encoded: Mapping[str, EncodedItem]) -> list[object]:
    """Return messages in which every named part holds metadata in place of its media.

    Args:
        messages: As `Conversation.messages`.
        encoded: By the name that the router gave the item; with metadata.
    """

    def bare(name: str, part: Part) -> object:
        item = encoded.get(name)
        if item is None:
            return part
        kind = f"{item.modality}_embeds"
        return {"type": kind, kind: item.metadata, "uuid": name}

    return [_rewritten(message, bare) for message in messages]


def rename_media(
    messages: Iterable[object], items: Iterable[MediaItem]
) -> tuple[list[object], tuple[MediaItem, ...]]:
    """Return messages and items with names that no metadata was sent under."""

    def renamed(name: str, part: Part) -> Part:
        return {**part, "uuid": msgspec.Raw(msgspec.json.encode(name + MEDIA_SUFFIX))}

    moved = tuple(
        msgspec.structs.replace(
            item, mm_hash=item.mm_hash + MEDIA_SUFFIX, part=renamed(item.mm_hash, item.part)
        )
        for item in items
    )
    return [_rewritten(message, renamed) for message in messages], moved


def _rewritten(message: object, write: Callable[[str, Part], object]) -> object:
    """Apply ``write`` to the parts that the router has named; only those are dictionaries."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    content = [
        write(msgspec.json.decode(part["uuid"], type=str), part)
        if isinstance(part, dict) and "uuid" in part
        else part
        for part in message["content"]
    ]
    return {**message, "content": content}
