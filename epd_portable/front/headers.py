"""Headers of a trusted gateway: engines that it names for a request, and those of the response.

The headers are llm-d's, and those of its first proposal. A gateway shows a key in the header
``x-epd-gateway-key``. Without a key the headers of placement are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

import msgspec

from epd_portable.config.api_keys import ApiKeys
from epd_portable.config.roles import Stage
from epd_portable.errors import RequestError
from epd_portable.front.exchange import FrontExchange, GracefulHTTPError
from epd_portable.front.request import EngineChoices, FrontItem
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.placement.profiles.selection_types import Decision

KEY = "x-epd-gateway-key"
PREFILLER = "x-prefiller-host-port"
ENCODERS = "x-encoder-hosts-ports"
ENCODERS_TOO = "x-encoder-host-ports"
"""Name of the same header in the first proposal."""
MAPPING = "x-encoder-image-mapping"
REFS = "x-embedding-refs"
CACHE_KEY = "x-encoding-cache-key"
MODEL = "x-encoder-model"
ENCODER_MODEL_LABEL = "llm-d.ai/encoder-model"
MAX_NAMED = 1024
_OTHERWISE = "the gateway's other headers count, then the front chooses"
T = TypeVar("T")


class OutputRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Place of an item's encoder output.

    Attributes:
        tensor_id: Name of the item; empty if only its number is known.
        image_index: Number of the item among the distinct ones of the request.
        encoder_host: ``host:port`` of the encode engine that has it.
    """

    tensor_id: str = ""
    image_index: int | None = None
    encoder_host: str = ""


_REF = '[{"image_index": 0, "encoder_host": "host:port"}]'


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """Engines that a trusted gateway names.

    Attributes:
        encoders: Engines among which items are distributed.
        mapping: Encoder of each item, by its number among the distinct ones.
        refs: Name, number and encoder of items that an encoder has.
        cache_key: Hashed in place of items' content; or empty.
        model: Encoder model that encoders must have by their label; or empty.
        of_model: Encoders that have it, or no such label.
        generator: Engine that generates; no header names it.
        local: The engine that takes the items encodes them itself, without a header.
    """

    prefiller: Instance | None = None
    encoders: Sequence[Instance] = ()
    mapping: Mapping[int, Instance] = field(default_factory=dict)
    refs: Sequence[tuple[str, int, Instance]] = ()
    cache_key: str = ""
    model: str = ""
    of_model: Sequence[Instance] = ()
    generator: Instance | None = None
    local: bool = False

    def of_items(self, names: Sequence[str]) -> dict[str, tuple[str, Instance]]:
        """Return header and engine of each named item, by its name.

        Raises:
            GracefulHTTPError: There are not so many items.
        """
        numbers = {name: number for number, name in enumerate(names)}
        refs = [(REFS, numbers.get(name, number), engine) for name, number, engine in self.refs]
        found = {}
        # Of two headers for one item the mapping counts.
        mapping = [(MAPPING, number, engine) for number, engine in self.mapping.items()]
        for header, number, engine in refs + mapping:
            if not 0 <= number < len(names):
                raise GracefulHTTPError(
                    f"{header}: item {number} of {len(names)} distinct ones: number them from 0",
                    HTTPStatus.BAD_REQUEST,
                )
            found[names[number]] = header, engine
        return found


def read_hints(values: Mapping[str, str], keys: ApiKeys, pool: EndpointPool) -> Hints | None:
    """Return the engines that a gateway names; ``None`` without its key.

    Raises:
        RequestError: 401 for a wrong key, 400 for an invalid header, 403 for an unknown address.
    """
    if KEY not in values:
        return None
    if not keys.holds(values[KEY]):
        raise RequestError(
            f"{KEY} is wrong: show one of the keys of front.gateway_keys_file, or no such header",
            status=401,
            code="invalid_hop_key",
        )
    engines = {address_of(each): each for each in pool.all}

    def find(header: str, address: str, duty: str = "encode") -> Instance:
        found = engines.get(address)
        if found is None:
            raise RequestError(
                f"{header}: {address[:256]!r} is no engine of this front: name one of "
                f"{', '.join(engines)[:1024]}",
                status=403,
                code="not_an_instance",
            )
        if duty not in found.duties:
            raise _invalid(header, f"{address} has the role {found.role!r}")
        return found

    named = values.get(ENCODERS, values.get(ENCODERS_TOO, ""))
    addresses = [*filter(None, map(str.strip, named.split(",")))]
    mapping = _decoded(values, MAPPING, dict[int, str], '{"0": "host:port"}')
    refs = _decoded(values, REFS, tuple[OutputRef, ...], _REF)
    if max(len(addresses), len(mapping), len(refs)) > MAX_NAMED:
        raise _invalid(ENCODERS, f"more than {MAX_NAMED} are named")
    places = [
        (ref.tensor_id, place if ref.image_index is None else ref.image_index, ref.encoder_host)
        for place, ref in enumerate(refs)
    ]
    having = [(name, number, find(REFS, host)) for name, number, host in places if host]
    by_number = {number: find(MAPPING, each) for number, each in mapping.items()}
    encoders = [find(ENCODERS, each) for each in addresses]
    model = values.get(MODEL, "")
    there = pool.of_duty("encode")
    of_model = [each for each in there if each.labels.get(ENCODER_MODEL_LABEL) in (None, model)]
    if model and not {*encoders, *by_number.values()}.issubset(of_model):
        raise _invalid(MODEL, f"a named engine has another encoder model than {model!r}")
    if model and there and not of_model:
        raise _invalid(MODEL, f"no encode engine has the model {model!r} as {ENCODER_MODEL_LABEL}")
    prefiller = values.get(PREFILLER, "").strip()
    return Hints(
        prefiller=find(PREFILLER, prefiller, "prefill") if prefiller else None,
        encoders=encoders,
        mapping=by_number,
        refs=having,
        cache_key=values.get(CACHE_KEY, ""),
        model=model,
        of_model=of_model,
    )


def of_response(one: FrontExchange) -> Iterator[tuple[str, str]]:
    """Yield headers that report to a trusted gateway where a request was computed."""
    if one.prefilled is not None:
        yield PREFILLER, address_of(one.prefilled)
    names = [*one.names]
    numbers = {name: number for number, name in enumerate(names)}
    pairs = sorted((numbers[name], each) for name, each in one.encoded.items())
    if not pairs:
        return
    mapping = {number: address_of(each) for number, each in pairs}
    yield ENCODERS, ",".join(dict.fromkeys(mapping.values()))
    yield MAPPING, _json({str(number): each for number, each in mapping.items()})
    refs = [
        OutputRef(image_index=number, encoder_host=each, tensor_id=names[number])
        for number, each in mapping.items()
    ]
    yield REFS, _json(refs)
    yield CACHE_KEY, hashlib.blake2b("".join(names).encode()).hexdigest()[:32]
    models = {each.labels.get(ENCODER_MODEL_LABEL, "") for _, each in pairs}
    if len(models) == 1 and (model := models.pop()):
        yield MODEL, model


def address_of(instance: Instance) -> str:
    """Return an engine's ``host:port``, or its name where it has no address."""
    return (instance.url or instance.control).partition("://")[2] or instance.name


def follow(choices: EngineChoices, hints: Hints) -> EngineChoices:
    """Return the choices of a gateway for a request, and others where it names nothing.

    Raises:
        GracefulHTTPError: A header numbers more items than there are.
    """
    return _ByHeaders(choices, hints)


class _ByHeaders(EngineChoices):
    """Choices by headers; by others where they name nothing."""

    def __init__(self, others: EngineChoices, hints: Hints) -> None:
        self.pool, self.one = others.pool, others.one
        self._others = others
        self._hints = hints
        names = [each.item_uuid for each in self.one.items]
        self._places = {name: place for place, name in enumerate(names)}
        self._by_item = hints.of_items(names)
        self.is_elastic = not (hints.encoders or self._by_item or hints.model)

    def choose_engine(self) -> Instance | None:
        named = self._hints.generator
        return named if named and named.health.usable else self._others.choose_engine()

    def disaggregates_prefill(self) -> bool:
        return self._hints.prefiller is not None or self._others.disaggregates_prefill()

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        chosen = self._named("prefill", PREFILLER, self._hints.prefiller, tried)
        return chosen or self._others.choose_prefill(tried)

    def stay(self, items: Sequence[FrontItem], engine: Instance) -> Collection[str]:
        if self._hints.local:
            return [each.item_uuid for each in items]
        if self._hints.encoders or self._by_item:
            return ()
        return self._others.stay(items, engine)

    def choose_encoder(self, item: FrontItem, exclude: Collection[str]) -> Instance | None:
        header, named = self._by_item.get(item.item_uuid, ("", None))
        chosen = self._named("encode", header, named, exclude, item.item_uuid)
        if chosen is None and self._hints.encoders:
            chosen = self._near(ENCODERS, self._hints.encoders, item, exclude)
        if chosen is None and self._hints.model:
            # No other one makes of an item what the language model was trained with.
            return self._near(MODEL, self._hints.of_model, item, exclude)
        if chosen is None and self._hints.cache_key:
            chosen = self._near(CACHE_KEY, self.pool.of_duty("encode"), item, exclude)
        return chosen or self._others.choose_encoder(item, exclude)

    def note_engine(self, engine: Instance) -> int:
        return self._others.note_engine(engine)

    def note_prompt(self, engine: Instance) -> int:
        return self._others.note_prompt(engine)

    def note_job(self, item: FrontItem, encoder: Instance, *, failed: bool = False) -> None:
        self._others.note_job(item, encoder, failed=failed)

    def _named(
        self,
        stage: Stage,
        header: str,
        named: Instance | None,
        exclude: Collection[str],
        item: str = "",
    ) -> Instance | None:
        """Return a named engine if it can have the work, and log that."""
        if named is None:
            return None
        if named.health.usable and named.name not in exclude:
            winner, reason = named, "named"
        else:
            why = "was tried or is full" if named.health.usable else f"is {named.health.state}"
            winner, reason = None, f"{named.name} is named and {why}: {_OTHERWISE}"
        name = winner.name if winner else ""
        self.record(Decision(stage=stage, item=item, header=header, winner=name, reason=reason))
        return winner

    def _near(
        self,
        header: str,
        candidates: Collection[Instance],
        item: FrontItem,
        exclude: Collection[str],
    ) -> Instance | None:
        """Return the engine of some that should encode an item, and log why."""
        key = item.item_uuid
        if self._hints.cache_key:
            key = f"{self._hints.cache_key}/{self._places.get(key, key)}"
        left = {each for each in candidates if each.health.usable and each.name not in exclude}
        chosen = self.pool.choose_encoder(key, exclude, left) if left else None
        otherwise = f"none of these can encode it: {_OTHERWISE}"
        if header == MODEL:
            otherwise = "no engine with this model can encode it, and no other may"
        return self.explain(
            "encode",
            chosen,
            "a hash, below the load bound",
            item=item.item_uuid,
            header=header,
            among=left,
            otherwise=otherwise,
        )


def _decoded(values: Mapping[str, str], header: str, kind: type[T], example: str) -> T:
    text = values.get(header, "")
    try:
        return msgspec.json.decode(text, type=kind) if text else kind()
    except (msgspec.MsgspecError, ValueError) as error:
        raise _invalid(header, f"{error}: write for example {example}") from error


def _invalid(header: str, problem: str) -> RequestError:
    return RequestError(f"{header}: {problem}", status=400, code="invalid_hop_header")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
