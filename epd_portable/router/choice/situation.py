"""What a policy sees: what is asked for, and how the instances are that could have it. Pure."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from epd_portable.media.formats import Modality
from epd_portable.router.choice.holdings import Holdings
from epd_portable.router.choice.prefix import BYTES_A_TOKEN

Stage = Literal["encode", "prefill", "decode"]

ROLE_LABEL = "llm-d.ai/role"
ENCODER_TYPE_LABEL = "llm-d.ai/encoder-type"
"""``vision``, ``audio`` or ``video``, or several of them with commas."""
MODEL_LABEL = "llm-d.ai/model"
ENCODER_TYPES: Mapping[Modality, frozenset[str]] = {
    "image": frozenset({"vision", "image"}),
    "video": frozenset({"vision", "video"}),
    "audio": frozenset({"audio"}),
}
"""Types of encoders that can have an item, by its modality."""

_ALL: frozenset[Stage] = frozenset({"encode", "prefill", "decode"})
_SHORT: Mapping[str, frozenset[Stage]] = {
    "all": _ALL,
    "both": frozenset({"prefill", "decode"}),
    "pd": frozenset({"prefill", "decode"}),
    "ep": frozenset({"encode", "prefill"}),
    "epd": _ALL,
    "e": frozenset({"encode"}),
    "p": frozenset({"prefill"}),
    "d": frozenset({"decode"}),
}
_TOP = float(1 << 64)


class AskedItem(Protocol):
    """One picture, video or clip of a request."""

    @property
    def mm_hash(self) -> str:
        """Its name by content."""

    @property
    def modality(self) -> Modality:
        """What it is to the model."""

    @property
    def pixels(self) -> int:
        """That it has once it is decoded; 0 if nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """For what an instance is chosen.

    Attributes:
        stage: That it is chosen for.
        key: Random bits of the router, one for each request: no client chooses by them.
        model: That the client names, or empty.
        session: The client's name for its conversation, or empty.
        items: Of the request.
        item: For ``encode`` the one that is to be encoded.
        blocks: Names of the request's text, block by block, each with all before it: equal for two
            requests as far as these begin alike. Media count by their content.
        having: Whose caches have the first of the blocks; ``None`` if nobody has looked it up.
        nbytes: Of the prompt, also of what is beyond the blocks; each token that an item is taken
            for counts as much as one of text.
        block_bytes: Of one block, if no ``ends`` are given.
        ends: Tokens of the prompt up to the end of each block.
        profile: Of the configuration, if the request names one that it may name.
    """

    stage: Stage
    key: str
    model: str = ""
    session: str = ""
    items: Sequence[AskedItem] = ()
    item: AskedItem | None = None
    blocks: Sequence[int] = ()
    having: Collection[Holdings] | None = None
    nbytes: int = 0
    block_bytes: int = 256
    ends: Sequence[int] = ()
    profile: str = ""

    @property
    def tokens(self) -> int:
        """Of the prompt: a guess."""
        return self.nbytes // BYTES_A_TOKEN

    def up_to(self, count: int) -> int:
        """Return how many tokens the prompt's first blocks have."""
        if self.ends and count:
            return self.ends[count - 1]
        return count * self.block_bytes // BYTES_A_TOKEN

    @property
    def affinity(self) -> str:
        """What should meet the same instance again."""
        if self.item is not None:
            return self.item.mm_hash
        return self.session or self.key

    def chance(self) -> float:
        """Return a number from 0 to below 1, always the same one; decides between equals."""
        # Another one for each item, so that the items of one request do not go the same way.
        return _hash(f"{self.key}\0{self.item.mm_hash}" if self.item else self.key) / _TOP


class Reported(Protocol):
    """How busy an instance has said that it is; ``None`` for what it does not tell."""

    @property
    def waiting(self) -> int | None:
        """Requests that wait at it."""

    @property
    def running(self) -> int | None:
        """Requests that its engine computes for."""

    @property
    def kv_used(self) -> float | None:
        """Used part of its KV cache, 0 to 1."""

    @property
    def items(self) -> int | None:
        """Items that wait at an encode instance."""

    @property
    def pixels(self) -> int | None:
        """Of these."""


class Contender(Protocol):
    """An instance that could be chosen, as it is at this moment."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def role(self) -> str:
        """What it serves: stages with ``-`` between them."""

    @property
    def labels(self) -> Mapping[str, str]:
        """What its operator says of it."""

    @property
    def weight(self) -> float:
        """How much it does of what the others do; positive."""

    @property
    def load(self) -> int:
        """Requests or jobs that the router has given to it and that have not ended."""

    @property
    def owed_s(self) -> float:
        """Seconds of encoding that the router has given to it."""

    @property
    def computes_for(self) -> int:
        """Requests that it computes for: they wait for no item."""

    @property
    def tokens(self) -> int:
        """Of prompts that the router has given to it, and whose answers have not begun."""

    @property
    def reported(self) -> Reported | None:
        """How busy it has said, within the last seconds, that it is; ``None`` if it has not."""

    @property
    def version(self) -> int:
        """Is another one whenever something above is."""

    @property
    def holdings(self) -> Holdings:
        """What it most likely has in its caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A contender that is only data: for tests, replayed histories and simulations."""

    name: str
    role: str = "prefill-decode"
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    load: int = 0
    owed_s: float = 0.0
    computes_for: int = 0
    tokens: int = 0
    reported: Reported | None = None
    version: int = 0
    holdings: Holdings = field(default_factory=Holdings)


def label(contender: Contender, key: str) -> str | None:
    """Return a label's value; an instance's role is one if nothing else is said."""
    value = contender.labels.get(key)
    return contender.role if value is None and key == ROLE_LABEL else value


@functools.lru_cache(maxsize=1024)
def stages(role: str) -> frozenset[Stage]:
    """Return what a role serves; nothing for a word that is none."""
    if role in _SHORT:
        return _SHORT[role]
    words = role.split("-")
    found = frozenset(stage for stage in _ALL if stage in words)
    return found if len(found) == len(words) else frozenset()


def place(key: str, contender: Contender) -> float:
    """Return how near a contender is to a key: the nearest one stays so when others come or go.

    Of many keys each contender is the nearest of a part as large as its weight. (Weighted
    rendezvous hashing: Mosko, ICN 2014; Schindelhauer and Schomaker, SPAA 2005.)

    Returns:
        A positive number; the larger the nearer.
    """
    number = _hash(f"{key}\0{contender.name}")
    return contender.weight / -math.log((number + 0.5) / _TOP)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
