"""An HTTP request at the front: its body, its response, and headers that place it.

The headers are llm-d's, and those of its first proposal. A gateway shows a key in the header
``x-epd-gateway-key``. Without a key the headers of placement are ignored.

vLLM's handlers run in the task of the request or in tasks that this one starts, so a context
variable leads from `epd_portable.front.http` to `epd_portable.front.client`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from vllm.v1.engine import EngineCoreRequest

from epd_portable.errors import RequestError
from epd_portable.placement.admission import AdmissionControl, QueuedRequest
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.responses import RETRY_AFTER_S
from epd_portable.vllm_plugin import compat
from epd_portable.wire.params import OutputSample

if TYPE_CHECKING:
    from epd_portable.config.api_keys import ApiKeys

GracefulHTTPError: Any = compat.graceful_error()
_CODES = {429: "engines_full", 503: "service_unavailable"}
"""Codes of errors that a later attempt can avoid, by status."""
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
LEFT_OUT = "x-epd-items-left-out"
MAX_NAMED = 1024
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
        prefiller: Engine that prefills, if one is named.
        encoders: Engines among which items are distributed.
        mapping: Encoder of each item, by its number among the distinct ones.
        refs: Name, number and encoder of items that an encoder has.
        cache_key: Hashed in place of items' content; or empty.
        model: Encoder model that encoders must have by their label; or empty.
        of_model: Encoders that have it, or no such label.
        generator: Engine that generates, if one is named; no header names it.
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


@dataclass(slots=True, eq=False)
class FrontExchange:
    """An HTTP request, which may be several requests to engines.

    Attributes:
        nbytes: Bytes of its body so far.
        key: Digest of the client's API key; empty without one.
        status: Status of the response; 0 before it.
        unread: The body has not been requested.
        begun: A part of the response is sent: the status cannot change any more.
        failure: Reason why the request is not served. The middleware sends it as the response.
        first_at: Monotonic time of the first byte of the response's body.
        nbytes_out: Bytes of the response's body.
        engine: Name of the engine that generates.
        prefilled: Engine that has prefilled for the other.
        tokens: Number of generated tokens.
        items: Origin of each item, an `ItemOutcome`, by its name.
        names: Names of the distinct items, in their order.
        encoded: Encoder of each item that is not encoded elsewhere, by the item's name.
        left_out: Names of items that the response does without.
        model: Name that the client requests.
        session: Name of the client's conversation; or empty.
        hints: Engines that a trusted gateway names; ``None`` for clients.
        samples: Samples of its items' encoder outputs, with the engine that took each, by the
            item's name; ``None`` if nothing wants them.
    """

    nbytes: int = 0
    key: bytes = b""
    status: int = 0
    request_id: str = ""
    unread: bool = True
    begun: bool = False
    failure: RequestError | ClientDisconnect | None = None
    first_at: float = 0.0
    nbytes_out: int = 0
    engine: str = ""
    prefilled: Instance | None = None
    tokens: int = 0
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    encoded: dict[str, Instance] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    model: str = ""
    session: str = ""
    hints: Hints | None = None
    samples: dict[str, tuple[str, OutputSample]] | None = None

    def of_response(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield further headers of the response."""
        for name, value in self._of_response():
            yield name.encode(), value.encode("latin-1", "replace")

    def _of_response(self) -> Iterator[tuple[str, str]]:
        if self.left_out:
            yield LEFT_OUT, str(len(self.left_out))
        if self.hints is None:
            return
        if self.prefilled is not None:
            yield PREFILLER, address_of(self.prefilled)
        names = [*self.names]
        numbers = {name: number for number, name in enumerate(names)}
        pairs = sorted((numbers[name], each) for name, each in self.encoded.items())
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

    def refuse(self, error: RequestError | GracefulHTTPError) -> None:
        """Respond with an error, also to a stream, of which vLLM has sent no part yet."""
        if self.begun or self.failure is not None:
            return
        if isinstance(error, GracefulHTTPError):
            status = int(error.http_status)
            self.failure = RequestError(
                error.message,
                status=status,
                code=_CODES.get(status, "invalid_request"),
                retry_after_s=RETRY_AFTER_S if status in _CODES else None,
            )
        else:
            self.failure = error


exchange: ContextVar[FrontExchange] = ContextVar("epd_exchange")
"""The HTTP request that the present task serves; unset outside of one."""


def current() -> FrontExchange:
    """Return the HTTP request of the present task, or a new one outside of any."""
    return exchange.get(None) or FrontExchange()


async def admit(admission: AdmissionControl, request: EngineCoreRequest) -> QueuedRequest | None:
    """Return when a request of vLLM's may go on; see `AdmissionControl.enter`.

    Raises:
        GracefulHTTPError: 429.
    """
    here = current()
    try:
        return await admission.enter(
            items=len({each.identifier for each in request.mm_features or ()}),
            nbytes=here.nbytes,
            key=here.key,
            priority=request.priority,
        )
    except RequestError as error:
        here.refuse(error)
        raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from error


def read_hints(values: Mapping[str, str], keys: ApiKeys, pool: EndpointPool) -> Hints:
    """Return the engines that a gateway names.

    Args:
        values: Headers, in lower case, with `KEY`.
        keys: Of trusted gateways.

    Raises:
        RequestError: 401 for a wrong key, 400 for an invalid header, 403 for an unknown address.
    """
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


def address_of(instance: Instance) -> str:
    """Return an engine's ``host:port``, or its name where it has no address."""
    return (instance.url or instance.control).partition("://")[2] or instance.name


def _decoded(values: Mapping[str, str], header: str, kind: type[T], example: str) -> T:
    """Return a header's JSON; an empty value without the header."""
    text = values.get(header, "")
    try:
        return msgspec.json.decode(text, type=kind) if text else kind()
    except (msgspec.MsgspecError, ValueError) as error:
        raise _invalid(header, f"{error}: write for example {example}") from error


def _invalid(header: str, problem: str) -> RequestError:
    return RequestError(f"{header}: {problem}", status=400, code="invalid_hop_header")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
