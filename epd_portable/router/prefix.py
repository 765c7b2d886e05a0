"""A prompt as a chain of blocks, equal as far as two prompts begin alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from epd_portable.placement.profiles.selection_types import Prompt

Piece = bytes | memoryview

BYTES_A_TOKEN = 4
"""Of text."""
LONGEST_NAME = 256
"""Of an item, in bytes."""


def chain(
    messages: Iterable[Iterable[Piece]],
    *,
    block_bytes: int,
    most: int,
    salt: bytes = b"",
    items: Mapping[bytes, int] = MappingProxyType({}),
) -> Prompt:
    """Return a prompt as blocks.

    A block ends with its message, so that a conversation begins as its earlier turns did. Names
    are of this process only.

    Args:
        messages: What each is made of.
        most: Blocks that are named; what comes after them is only counted.
        salt: Of what else a prompt depends on, such as tools.
        items: Tokens of items, by the pieces that stand for them.
    """
    names: list[int] = []
    ends: list[int] = []
    last = hash(salt)
    nbytes = extra = 0
    for message in messages:
        wanted = (most - len(names)) * block_bytes
        pieces: list[Piece] = []
        begins: list[tuple[int, int]] = []
        size = 0
        for piece in message:
            if size < wanted:
                pieces.append(piece[: wanted - size])
            if items and len(piece) <= LONGEST_NAME and (tokens := items.get(bytes(piece))):
                begins.append((size, tokens))
            size += len(piece)
        text = b"".join(pieces)
        begins.reverse()
        for start in range(0, len(text), block_bytes):
            end = min(start + block_bytes, len(text))
            last = hash((last, text[start:end]))
            while begins and begins[-1][0] < end:
                extra += begins.pop()[1]
            names.append(last)
            ends.append((nbytes + end) // BYTES_A_TOKEN + extra)
        extra += sum(tokens for _, tokens in begins)
        nbytes += size
    return Prompt(tuple(names), tuple(ends), nbytes // BYTES_A_TOKEN + extra)
