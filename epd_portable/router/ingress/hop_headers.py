"""Routing hints of a trusted hop, in headers: which instances encode, prefill and answer.

They are llm-d's, and those of its first proposal. A hop shows a key; without one they
are not looked at, as no header of a client reaches an instance that is not named.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd_portable.errors import RequestError
from epd_portable.router.ingress.access import ApiKeys

KEY = "x-epd-hop-key"
"""Header with a hop's key."""
PREFILLER = "x-prefiller-host-port"
ENCODERS = "x-encoder-hosts-ports"
ENCODERS_TOO = "x-encoder-host-ports"
"""The same in the first proposal."""
MAPPING = "x-encoder-image-mapping"
REFS = "x-embedding-refs"
CACHE_KEY = "x-encoding-cache-key"
MODEL = "x-encoder-model"
ENCODER_MODEL_LABEL = "llm-d.ai/encoder-model"
MAX_NAMED = 1024


class EmbeddingRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the encoder's output of an item is.

    Attributes:
        tensor_id: The item's name by content; empty if only its place is known.
        image_index: Of the item among the distinct ones of the request.
        encoder_host: ``host:port`` of the encode instance that has it.
    """

    tensor_id: str = ""
    image_index: int | None = None
    encoder_host: str = ""


_refs = msgspec.json.Decoder(list[EmbeddingRef])
_mapping = msgspec.json.Decoder(dict[str, str])


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a trusted hop says of a request; addresses are ``host:port``.

    Attributes:
        prefiller: Instance that computes the prompt, and answers if its role is to; or empty.
        encoders: Instances that encode; empty leaves that to the router.
        mapping: Encoder of each item, by its place among the distinct ones.
        refs: Where outputs of items are already.
        cache_key: In place of items' content, what leads them to an encoder; or empty.
        model: That encoders must have, as their labels say; or empty.
    """

    prefiller: str = ""
    encoders: tuple[str, ...] = ()
    mapping: Mapping[int, str] = {}
    refs: tuple[EmbeddingRef, ...] = ()
    cache_key: str = ""
    model: str = ""


class Hops:
    """Tells hops that are trusted from clients."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def read(self, headers: Mapping[str, str]) -> RoutingHints | None:
        """Return what a hop says; ``None`` if it is a client, whatever that says.

        Raises:
            RequestError: 401, the key is wrong; 400, a header cannot be read.
        """
        shown = headers.get(KEY)
        if shown is None:
            return None
        if not self._keys.holds(shown):
            raise RequestError(
                f"{KEY} is wrong: show one of the keys of router.hop_keys_file, or no such header",
                status=401,
                code="invalid_hop_key",
            )
        encoders = headers.get(ENCODERS, headers.get(ENCODERS_TOO, ""))
        found = RoutingHints(
            prefiller=headers.get(PREFILLER, "").strip(),
            encoders=tuple(filter(None, map(str.strip, encoders.split(",")))),
            mapping=_read_mapping(headers.get(MAPPING, "")),
            refs=_read_refs(headers.get(REFS, "")),
            cache_key=headers.get(CACHE_KEY, ""),
            model=headers.get(MODEL, ""),
        )
        if max(len(found.encoders), len(found.mapping), len(found.refs)) > MAX_NAMED:
            raise wrong_header(ENCODERS, f"more than {MAX_NAMED} are named")
        return found


def _read_mapping(text: str) -> Mapping[int, str]:
    if not text:
        return {}
    try:
        found = _mapping.decode(text)
        return {int(index): address for index, address in found.items()}
    except (msgspec.MsgspecError, ValueError) as error:
        raise wrong_header(MAPPING, f'give an object like {{"0": "host:port"}}: {error}') from error


def _read_refs(text: str) -> tuple[EmbeddingRef, ...]:
    if not text:
        return ()
    try:
        return tuple(_refs.decode(text))
    except (msgspec.MsgspecError, ValueError) as error:
        example = '[{"image_index": 0, "encoder_host": "host:port"}]'
        raise wrong_header(REFS, f"give a list like {example}: {error}") from error


def wrong_header(header: str, problem: str) -> RequestError:
    """Return the error for what a hop says that makes no sense."""
    return RequestError(f"{header}: {problem}", status=400, code="invalid_hop_header")
