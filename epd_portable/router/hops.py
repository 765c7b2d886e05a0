"""Routing hints of a trusted hop, in headers: read, made the router's, and answered.

A hop says which instances encode, prefill and answer. The headers are llm-d's, and those of its
first proposal. A hop shows a key; without one they are not looked at, as no header of a client
reaches an instance that is not named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from epd_portable.config.api_keys import ApiKeys
from epd_portable.errors import RequestError
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.placement.profiles.selection_types import Decision, Stage
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.observability.record import RequestRecord
from epd_portable.router.prefill import asks_for_kv, brings_kv
from epd_portable.router.selector import Selection

DESTINATION = "x-gateway-destination-endpoint"
"""Header that names the instance which answers, in the endpoint picker protocol."""
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
T = TypeVar("T")
OTHERWISE = "what the hop says beside it counts, else the router chooses"
"""What is done where a header names no usable instance."""


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


_REF = '[{"image_index": 0, "encoder_host": "host:port"}]'


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a trusted hop says of a request; addresses are ``host:port``.

    Attributes:
        answers: Instance that answers; or empty.
        prefiller: Instance that computes the prompt, and answers if its role is to; or empty.
        encoders: Instances that encode; empty leaves that to the router.
        mapping: Encoder of each item, by its place among the distinct ones.
        refs: Where outputs of items are already.
        cache_key: In place of items' content, what leads them to an encoder; or empty.
        model: That encoders must have, as their labels say; or empty.
    """

    answers: str = ""
    prefiller: str = ""
    encoders: tuple[str, ...] = ()
    mapping: Mapping[int, str] = {}
    refs: tuple[EmbeddingRef, ...] = ()
    cache_key: str = ""
    model: str = ""


def read_hints(headers: Mapping[str, str], keys: ApiKeys) -> RoutingHints | None:
    """Return what a hop says; ``None`` if it is a client, whatever that says.

    Raises:
        RequestError: 401, the key is wrong; 400, a header cannot be read.
    """
    shown = headers.get(KEY)
    if shown is None:
        return None
    if not keys.holds(shown):
        raise RequestError(
            f"{KEY} is wrong: show one of the keys of router.hop_keys_file, or no such header",
            status=401,
            code="invalid_hop_key",
        )
    encoders = headers.get(ENCODERS, headers.get(ENCODERS_TOO, ""))
    found = RoutingHints(
        # Those after the first are for a gateway's retries.
        answers=headers.get(DESTINATION, "").partition(",")[0].strip(),
        prefiller=headers.get(PREFILLER, "").strip(),
        encoders=tuple(filter(None, map(str.strip, encoders.split(",")))),
        mapping=_decoded(headers, MAPPING, dict[int, str], '{"0": "host:port"}'),
        refs=_decoded(headers, REFS, tuple[EmbeddingRef, ...], _REF),
        cache_key=headers.get(CACHE_KEY, ""),
        model=headers.get(MODEL, ""),
    )
    if max(len(found.encoders), len(found.mapping), len(found.refs)) > MAX_NAMED:
        raise wrong_header(ENCODERS, f"more than {MAX_NAMED} are named")
    return found


def _decoded(headers: Mapping[str, str], header: str, kind: type[T], example: str) -> T:
    """Return what a header says in JSON; something empty without one."""
    text = headers.get(header, "")
    try:
        return msgspec.json.decode(text, type=kind) if text else kind()
    except (msgspec.MsgspecError, ValueError) as error:
        raise wrong_header(header, f"give for example {example}: {error}") from error


def wrong_header(header: str, problem: str) -> RequestError:
    """Return the error for what a hop says that makes no sense."""
    return RequestError(f"{header}: {problem}", status=400, code="invalid_hop_header")


Named = tuple[str, Instance]
"""Who is named, after the header that does so."""


class HopSelection(Selection):
    """The choices of a hop for one request; another's where it says nothing.

    Who it names and who fails is replaced as any instance is: first by others that it names.

    Raises:
        RequestError: An address is no instance's, or its role is another one.
    """

    __slots__ = ("_by_item", "_encoders", "_hints", "_inner", "_places", "_stages")

    def __init__(self, hints: RoutingHints, inner: Selection) -> None:
        call = inner.call
        super().__init__(inner.instances, call, inner.key, inner.explanation)
        self._hints = hints
        self._inner = inner
        by_address = {_address(each): each for each in self.instances.all}

        def find(header: str, address: str, *, encodes: bool = False) -> Named:
            found = by_address.get(address)
            if found is None:
                raise RequestError(
                    f"{header}: {address[:256]!r} is no instance of this router: register it "
                    "there, or name the host:port of one that is",
                    status=403,
                    code="not_an_instance",
                )
            if not ("encode" in found.duties if encodes else found.role != "encode"):
                raise wrong_header(header, f"{_address(found)} has the role {found.role!r}")
            if encodes and hints.model and not _has_model(found, hints.model):
                label = found.settings.labels[ENCODER_MODEL_LABEL]
                message = f"{found.name} has the encoder model {label!r}, not {hints.model!r}"
                raise wrong_header(MODEL, message)
            return header, found

        self._stages: dict[Stage, Named] = {}
        if hints.prefiller:
            _, first = named = find(PREFILLER, hints.prefiller)
            if "answer" in first.duties:
                self._stages["decode"] = named
            if "prefill" in first.duties or asks_for_kv(call):
                self._stages["prefill"] = named
        if hints.answers:
            _, answers = named = find(DESTINATION, hints.answers)
            if "answer" not in answers.duties:
                raise wrong_header(DESTINATION, f"{hints.answers} has the role {answers.role!r}")
            self._stages["decode"] = named
        # An item may be given another name on its way.
        self._places = {item.item_uuid: place for place, item in enumerate(call.items)}
        self._encoders = [find(ENCODERS, each, encodes=True)[1] for each in hints.encoders]
        self._by_item = {
            _item_at(MAPPING, index, call): find(MAPPING, address, encodes=True)
            for index, address in hints.mapping.items()
        }
        for place, ref in enumerate(hints.refs):
            name = ref.tensor_id
            if name not in self._places:
                name = _item_at(REFS, place if ref.image_index is None else ref.image_index, call)
            if ref.encoder_host:
                self._by_item.setdefault(name, find(REFS, ref.encoder_host, encodes=True))

    def choose_pd(self, tried: Collection[str]) -> Instance | None:
        """See `Selection`."""
        if not asks_for_kv(self.call):
            named = self._stages.get("decode")
            return self._taken("decode", named, tried) or self._inner.choose_pd(tried)
        if (named := self._stages.get("prefill")) is None:
            return self._inner.choose_prefill(tried)
        otherwise = "nobody else computes for a hop that wants this one"
        return self._taken("prefill", named, tried, otherwise=otherwise)

    def disaggregates_prefill(self, decode: Instance) -> bool:
        """See `Selection`."""
        if brings_kv(self.call) or asks_for_kv(self.call):
            return False
        return "prefill" in self._stages or self._inner.disaggregates_prefill(decode)

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        """See `Selection`."""
        named = self._stages.get("prefill")
        return self._taken("prefill", named, tried) or self._inner.choose_prefill(tried)

    @property
    def is_elastic(self) -> bool:
        """See `Selection`: who is named to encode does."""
        return not (self._encoders or self._by_item or self._hints.model)

    def items_to_encode(self, items: Sequence[MediaItem], pd: Instance) -> Sequence[MediaItem]:
        """See `Selection`."""
        if brings_kv(self.call):
            return ()
        if self._encoders or self._by_item:
            return items
        return self._inner.items_to_encode(items, pd)

    def choose_encoder(self, item: MediaItem, exclude: Collection[str]) -> Instance | None:
        """See `Selection`."""
        chosen = self._taken("encode", self._by_item.get(item.item_uuid), exclude, item)
        if chosen is None and self._encoders:
            chosen = self._near(ENCODERS, self._encoders, item, exclude)
        if chosen is None and self._hints.model:
            # No other one makes of an item what the language model was trained with.
            return self._near(MODEL, self._of_model(), item, exclude)
        if chosen is None and self._hints.cache_key:
            chosen = self._near(CACHE_KEY, self.instances.of_duty("encode"), item, exclude)
        return chosen or self._inner.choose_encoder(item, exclude)

    def note_request(self, pd: Instance, items: Iterable[MediaItem]) -> int:
        """See `Selection`."""
        return self._inner.note_request(pd, items)

    def note_encode_job(self, item: MediaItem, encoder: Instance, *, failed: bool = False) -> None:
        """See `Selection`."""
        self._inner.note_encode_job(item, encoder, failed=failed)

    def _taken(
        self,
        stage: Stage,
        named: Named | None,
        exclude: Collection[str],
        item: MediaItem | None = None,
        otherwise: str = OTHERWISE,
    ) -> Instance | None:
        """Return the instance that is named, if one is and can have it, and explain it."""
        if named is None:
            return None
        header, found = named
        fits = _fits(found, exclude)
        decision = Decision(stage=stage, item=item.item_uuid if item else "", header=header)
        if fits:
            decision.winner, decision.reason = found.name, "named"
        else:
            why = "was tried" if found.name in exclude else f"is {found.state}"
            decision.reason = f"{found.name} is named and {why}: {otherwise}"
        self.record(decision)
        return found if fits else None

    def _near(
        self,
        header: str,
        candidates: Collection[Instance],
        item: MediaItem,
        exclude: Collection[str],
    ) -> Instance | None:
        """Return who of those that a header leaves should have an item, and explain it."""
        key, by = item.item_uuid, "an item's hash"
        if self._hints.cache_key:
            key = f"{self._hints.cache_key}/{self._places.get(item.item_uuid, item.item_uuid)}"
            by = CACHE_KEY
        left = [each for each in candidates if _fits(each, exclude)]
        chosen = self.instances.choose_encoder(key, exclude, set(left)) if left else None
        if self.explanation is not None:
            there = len(self.instances.of_duty("encode"))
            decision = Decision(stage="encode", item=item.item_uuid, header=header)
            decision.filters = {"there": there, header: len(candidates), "usable": len(left)}
            decision.totals = {each.name: -each.load for each in left}
            if chosen is not None:
                decision.winner = chosen.name
                decision.reason = f"by {by}, within the load bound; total is the load, below zero"
            elif header == MODEL:
                decision.reason = "none of those that have the model can have it, and no other may"
            else:
                decision.reason = f"none of those can have it: {OTHERWISE}"
            self.record(decision)
        return chosen

    def _of_model(self) -> list[Instance]:
        """Return encoders that have the model, or may: they have no label.

        Raises:
            RequestError: There is none.
        """
        encoders = self.instances.of_duty("encode")
        found = [each for each in encoders if _has_model(each, self._hints.model)]
        if encoders and not found:
            message = f"no encode instance has the model {self._hints.model!r} in its label "
            raise wrong_header(MODEL, message + ENCODER_MODEL_LABEL)
        return found


def answer_headers(
    record: RequestRecord, call_items: Sequence[str], instances: EndpointPool
) -> dict[str, str]:
    """Return the headers of an answer that say to a hop which instances did what."""
    headers = {}
    by_name = {each.name: each for each in instances.all}
    for leg in record.legs:
        instance = by_name.get(leg.instance)
        # Who only prefills answers the hop that asked for that.
        if instance is not None and "prefill" in instance.duties and not leg.failed:
            headers[PREFILLER] = _address(instance)
    mapping, models = {}, set()
    for index, item in enumerate(record.items):
        encoder = by_name.get(item.jobs[-1].instance) if item.jobs else None
        if encoder is not None and item.end in ("", "encoded", "retried"):
            mapping[index] = _address(encoder)
            models.add(encoder.settings.labels.get(ENCODER_MODEL_LABEL, ""))
    if mapping:
        headers[ENCODERS] = ",".join(dict.fromkeys(mapping.values()))
        headers[MAPPING] = _json({str(index): address for index, address in mapping.items()})
        refs = [
            EmbeddingRef(image_index=index, encoder_host=address, tensor_id=call_items[index])
            for index, address in mapping.items()
        ]
        headers[REFS] = _json(refs)
        headers[CACHE_KEY] = hashlib.blake2b("".join(call_items).encode()).hexdigest()[:32]
        if len(models) == 1 and (model := models.pop()):
            headers[MODEL] = model
    return headers


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _address(instance: Instance) -> str:
    return instance.url.partition("://")[2]


def _fits(instance: Instance, exclude: Collection[str]) -> bool:
    return instance.usable and instance.name not in exclude


def _has_model(encoder: Instance, model: str) -> bool:
    return encoder.settings.labels.get(ENCODER_MODEL_LABEL, model) == model


def _item_at(header: str, index: int, call: Call) -> str:
    """Return the name of the item at a place among those of a request."""
    if not 0 <= index < len(call.items):
        raise wrong_header(header, f"there is no item {index}: the request has {len(call.items)}")
    return call.items[index].item_uuid
