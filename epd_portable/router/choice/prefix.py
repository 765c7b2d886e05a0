"""A prompt as a chain of blocks, equal as far as two prompts begin alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Piece = bytes | memoryview

BYTES_A_TOKEN = 4
"""Of text."""
LONGEST_NAME = 256
"""Of an item, in bytes."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, cut into blocks.

    Attributes:
        blocks: Their names, each made of its text and of all before it: equal for two prompts as
            far as these begin alike.
        ends: Tokens up to the end of each.
        nbytes: Also of what is beyond the blocks; each token that an item is taken for counts as
            much as one of text.
    """

    blocks: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def tokens(self) -> int:
        """Of all of it, estimated."""
        return self.nbytes // BYTES_A_TOKEN

    def up_to(self, count: int) -> int:
        """Return how many tokens the first blocks have."""
        return self.ends[count - 1] if count else 0


NO_PROMPT = Prompt()


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
    return Prompt(tuple(names), tuple(ends), nbytes + extra * BYTES_A_TOKEN)
