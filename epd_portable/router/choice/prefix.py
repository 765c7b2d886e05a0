"""A prompt as a chain of blocks: equal as far as two prompts begin alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Piece = bytes | memoryview


def chain(
    messages: Iterable[Iterable[Piece]], *, block_bytes: int, most: int, salt: bytes = b""
) -> tuple[tuple[int, ...], int]:
    """Return names of blocks, and the bytes of all messages.

    A block ends with its message, so that a conversation begins as its earlier turns did. Each
    block's name is made of its bytes and of the name before it. Names are of this process only.

    Args:
        messages: What each is made of.
        block_bytes: Longest block.
        most: Blocks that are named; what comes after them is only counted.
        salt: Of what else a prompt depends on, such as tools.
    """
    names: list[int] = []
    last = hash(salt)
    nbytes = 0
    for message in messages:
        wanted = (most - len(names)) * block_bytes
        pieces: list[Piece] = []
        for piece in message:
            nbytes += len(piece)
            if wanted > 0:
                pieces.append(piece[:wanted])
                wanted -= len(piece)
        text = b"".join(pieces)
        for start in range(0, len(text), block_bytes):
            last = hash((last, text[start : start + block_bytes]))
            names.append(last)
    return tuple(names), nbytes
