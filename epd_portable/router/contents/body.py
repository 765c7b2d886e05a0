"""A client's request body: read once, checked, and written for the instances. Pure.

What a client sent goes on as its own bytes wherever nothing had to be changed, and no image, video
or audio clip is decoded, copied or encoded on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from epd_portable.errors import RequestError
from epd_portable.media.limits import MediaLimits, check_settings
from epd_portable.placement.replies import JSON, RETRY_AFTER_S
from epd_portable.router.contents.cut_text import Bytes, CutText, Data, Segments, decode, opens
from epd_portable.router.contents.media import FindMedia, MediaItem, MediaReader, Part
from epd_portable.wire.params import EncodedItem, EncodeParams, EncodeTransfer, PrefillParams

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
"""Of Anthropic's interface."""
COUNT_PATH = "/v1/messages/count_tokens"
RENDER = "/render"
"""What such a path ends with shows what would be computed: items are named, and nothing encoded."""
DECISION_PATH = "/v1/systemone"
BATCH_PATH = "/v1/chat/completions/batch"

MAX_JSON_BYTES = 8 << 20
"""Of one body, its long strings not counted: it is read at once, and no other request is served
meanwhile. No model reads a text as long."""
MAX_COMMAS = 1_000_000
MAX_MESSAGES_COMMAS = 300_000
MAX_STRINGS = 100_000
"""In them, in those of a chat request, and how many strings. Every value of a list or object takes
some 60 bytes and 50 ns while the body is read, even one of 2 bytes in it. There are no more values
than commas, and no more names than strings; a prompt of tokens has many values, but is not taken
apart."""
SMALL_BYTES = 64 * 1024
"""Bodies up to this size are not counted: there are no more of them than connections."""

_RESPONSES = frozenset({RESPONSES_PATH, RESPONSES_PATH + RENDER})
_ANTHROPIC = frozenset({MESSAGES_PATH, MESSAGES_PATH + RENDER, COUNT_PATH})
_ENCODED_APART = frozenset({CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH})
"""Paths whose items go to encoders; those of others a prefill+decode instance encodes itself."""
_MESSAGES = (frozenset({"messages"}), 'a list of messages, [{"role": "user", "content": "..."}]')
_INPUT = (frozenset({"input"}), 'a text, or a list like [{"role": "user", "content": "..."}]')
_PROMPTS: Mapping[str, tuple[frozenset[str], str]] = {
    CHAT_PATH: _MESSAGES,
    COMPLETION_PATH: (frozenset({"prompt", "prompt_embeds"}), "the text to complete"),
    **dict.fromkeys(_ANTHROPIC, _MESSAGES),
    **dict.fromkeys(_RESPONSES, _INPUT),
}
"""Fields of which one holds the prompt, and an example, by the path."""

_ENCODER_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what the encoder computes."""
_SALT = "cache_salt"
"""Field that an item's key depends on, too: requests share items only with the same salt."""
_NESTED_PARTS = frozenset(
    ["data_1", "data_2", "documents", "inputs", "items", "queries", "query", "text_1", "text_2"]
)
"""Fields of requests for scores and embeddings in which parts may stand as in messages."""
_IMAGES = "images"
"""Field of requests for embeddings with images' URLs."""
_WITH_SOUND = frozenset({"video", "audio"})
"""Modalities of which an item can be two to the engine, if a video's sound is taken too; those are
encoded where the whole prompt is."""
MEDIA_SUFFIX = "-media"
"""What is added to an item's name when its media are sent after its metadata."""
KV = "kv_transfer_params"
STRIPPED = frozenset({"ec_transfer_params", KV})
"""Fields that travel between the router and its instances; what a client puts there is dropped.
The second one goes on if it comes from a hop that is trusted (`epd_portable.router.hops`)."""

_PROMPT_FIELDS = ("messages", "input", "prompt")
"""Fields that hold a prompt, by the interface."""
_PROMPT_SALTS = ("tools", "chat_template", "chat_template_kwargs", "system", "instructions")
"""Fields that stand before the messages of a prompt, or change all of it."""

_raws = msgspec.json.Decoder(list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_settings = msgspec.json.Decoder(dict[str, object] | None)


@dataclass(slots=True)
class HeldBytes:
    """What all large bodies that are held may take together, and take."""

    limit: int
    count: int = 0


@dataclass(slots=True)
class Body:
    """A body within limits, as a context manager: it is counted until it is left.

    Attributes:
        remedy: Of the error for a larger one.
        counted: Its bytes that are part of the sum.
    """

    held: HeldBytes
    max_bytes: int
    remedy: str = "send smaller images, or raise router.max_body_bytes"
    counted: int = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.count -= self.counted
        self.counted = 0

    def count(self, nbytes: int) -> None:
        """Count what has come of the body, or has been put into it.

        Raises:
            RequestError: 413 or 503; it is too large, or all are together.
        """
        if nbytes > self.max_bytes:
            raise self.too_large(nbytes)
        if nbytes <= SMALL_BYTES:
            return
        more = nbytes - self.counted
        held = self.held
        if held.count + more > held.limit:
            raise RequestError(
                f"{held.count} bytes of request bodies are held, and another {more} would be "
                f"more than router.max_bodies_bytes of {held.limit}; try again later",
                status=503,
                code="too_many_bytes",
                retry_after_s=RETRY_AFTER_S,
            )
        held.count += more
        self.counted = nbytes

    def too_large(self, nbytes: int) -> RequestError:
        """Return the error for a body that is larger than one may be."""
        return RequestError(
            f"request body of at least {nbytes} bytes: at most {self.max_bytes} bytes "
            f"are accepted; {self.remedy}",
            status=413,
            code="body_too_large",
        )


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What requests may ask for.

    Attributes:
        max_items: Most images, videos and audio clips in one request.
        limits: What media may become when they are decoded.
        pd_takes_media: Whether prefill+decode instances hold an encoder, or whether metadata go to
            them in place of media, which only chat requests have a place for.
        takes_kv: Whether it comes from a hop that may say where the KV of its prompt is.
    """

    max_items: int = 64
    limits: MediaLimits = MediaLimits()
    pd_takes_media: bool = True
    takes_kv: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, ready to be sent.

    Attributes:
        path: Of the endpoint, at the router and at the instance.
        changed: Whether it goes on as `fields`, rather than as it came.
        fields: Of the body's top level, rewritten.
        model: That was asked for; empty for whichever is served.
        settings: Fields that change what an encoder makes of an item.
        items: Distinct images, videos and audio clips that are encoded elsewhere.
        takes_metadata: Whether metadata of its items can go in place of their media.
    """

    method: str = "POST"
    path: str
    query: str = ""
    cut: CutText
    changed: bool = False
    fields: Mapping[str, object] = {}
    model: str = ""
    settings: Mapping[str, object] = {}
    items: tuple[MediaItem, ...] = ()
    stream: bool = False
    takes_metadata: bool = False

    @classmethod
    def untouched(cls, method: str, path: str, data: Data) -> Call:
        """Return a call whose body is not read."""
        return cls(method=method, path=path, cut=CutText(data, whole=True))

    def for_pd(
        self, params: PrefillParams | None, metadata: Mapping[str, EncodedItem] | None = None
    ) -> Segments:
        """Return the body for a prefill+decode instance.

        Args:
            params: ``None`` if it expects no transfer.
            metadata: What encoders answered for the items, by item UUID: goes in place of their
                media.
        """
        fields = self.fields
        if metadata is not None:

            def described(name: str, part: Part) -> object:
                if (item := metadata.get(name)) is None:
                    return part
                kind = f"{item.modality}_embeds"
                return {"type": kind, kind: item.metadata, "uuid": name}

            fields = self._with_items(described)
        if params is not None:
            fields = {**fields, "ec_transfer_params": params}
        elif metadata is None and not self.changed:
            return [self.cut.original()]
        return self.cut.segments(msgspec.json.encode(fields))

    def for_encoder(self, item: MediaItem, transfer: EncodeTransfer) -> Segments:
        """Return the body of the encode job for one item: nothing of the text is in it.

        It names no model: an encode instance has one, by whatever names others serve it.
        """
        job = {
            "messages": [{"role": "user", "content": [item.part]}],
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            **self.settings,
            "ec_transfer_params": EncodeParams(transfers=(transfer,)),
        }
        return self.cut.segments(msgspec.json.encode(job))

    def renamed(self) -> Call:
        """Return this call with names for its items that were never sent without media.

        The engine keeps what its front end made of an item under the item's name. Made from
        metadata alone, it holds no pixels, and no later request with the media would bring them.
        """

        def with_other_name(name: str, part: Part) -> Part:
            return {**part, "uuid": msgspec.Raw(msgspec.json.encode(name + MEDIA_SUFFIX))}

        items = tuple(
            msgspec.structs.replace(
                item,
                item_uuid=item.item_uuid + MEDIA_SUFFIX,
                part=with_other_name(item.item_uuid, item.part),
            )
            for item in self.items
        )
        fields = self._with_items(with_other_name)
        return msgspec.structs.replace(self, changed=True, fields=fields, items=items)

    def without(self, names: Collection[str]) -> Call:
        """Return this call with texts in place of some of its items."""
        missing = {each.item_uuid: each.modality for each in self.items if each.item_uuid in names}

        def noted(name: str, part: Part) -> object:
            if name not in missing:
                return part
            return {"type": "text", "text": f"[{missing[name]} not available]"}

        items = tuple(each for each in self.items if each.item_uuid not in missing)
        fields = self._with_items(noted)
        return msgspec.structs.replace(self, changed=True, fields=fields, items=items)

    def _with_items(self, write: Callable[[str, Part], object]) -> Mapping[str, object]:
        """Return the fields with other parts for the items of a chat."""
        messages = self.fields["messages"]
        assert isinstance(messages, list), "a chat with items has messages that name them"
        return {**self.fields, "messages": [_with_items(each, write) for each in messages]}


def _with_items(message: object, write: Callable[[str, Part], object]) -> object:
    """Apply ``write`` to the parts that hold items; only those are dictionaries with a name."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    content = [
        write(msgspec.json.decode(part["uuid"], type=str), part)
        if isinstance(part, dict) and "uuid" in part
        else part
        for part in message["content"]
    ]
    return {**message, "content": content}


# What a prompt is made of, whatever interface it came by.


def prompt_pieces(call: Call) -> Iterator[Iterable[Bytes]]:
    """Yield what each message of a prompt is made of; of an item, its name."""
    for name in _PROMPT_FIELDS:
        given = call.fields.get(name)
        if given is None:
            continue
        if isinstance(given, msgspec.Raw):
            is_list = opens(given, b"[") and name != "prompt"
            given = _raws.decode(given) if is_list else [given]
        assert isinstance(given, Sequence)
        for message in given:
            yield _of_message(call, message)
        return


def _of_message(call: Call, message: object) -> Iterator[Bytes]:
    if isinstance(message, msgspec.Raw):
        yield from call.cut.segments(bytes(message))
    elif isinstance(message, Mapping) and "uuid" in message:
        yield bytes(message["uuid"])
    elif isinstance(message, Mapping):
        for name, value in message.items():
            yield name.encode()
            yield from _of_message(call, value)
    elif isinstance(message, Sequence):
        for part in message:
            yield from _of_message(call, part)


def prompt_salt(call: Call) -> bytes:
    """Return what stands before the messages of a prompt, or changes all of it."""
    given = (call.fields.get(name) for name in _PROMPT_SALTS)
    raws = [bytes(each) if isinstance(each, msgspec.Raw) else b"" for each in given]
    return b"\0".join([call.model.encode(), *map(call.cut.whole, raws)])


def text_field(call: Call, name: str) -> str:
    """Return a field of the body that holds a text; empty if it does not."""
    raw = call.fields.get(name)
    if not isinstance(raw, msgspec.Raw) or not opens(raw, b'"'):
        return ""
    return call.cut.whole(bytes(raw)).decode("utf-8", "replace")


def size(segments: Segments) -> int:
    """Return how many bytes a body has."""
    return sum(map(len, segments))


def check_json(headers: Mapping[str, str]) -> None:
    """Check that a request with a body of JSON says so: no HTML form of another page can.

    Raises:
        RequestError: 415; it does not.
    """
    given = headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != JSON["content-type"]:
        raise RequestError(
            f"content-type {given[:128]!r} is not served at this path: send JSON, with the "
            f"header 'content-type: {JSON['content-type']}'",
            status=415,
            code="unsupported_media_type",
        )


def read_call(path: str, data: Data, rules: Rules, find: FindMedia | None = None) -> Call:
    """Read the body of a request.

    Of bodies for which there is no reader, only what could harm others is looked at.

    Args:
        data: As the client sent it; must not change afterwards.
        find: Finds what it names by URL. If something of that has to be fetched first, the call
            cannot be sent, and the body is to be read once more.

    Raises:
        RequestError: 4xx; names the place, the value and the remedy.
    """
    cut, fields, changed = _read_object(data, rules)
    _check_fields(path, fields)
    model = _given(fields, "model")
    call = Call(
        path=path,
        cut=cut,
        changed=changed,
        fields=fields,
        model="" if model is None else cut.text(model, "model"),
        stream=bytes(fields.get("stream", b"")) == b"true",
        takes_metadata=path == CHAT_PATH,
    )
    walks = _walks(path, fields)
    if not walks:
        return call
    names = () if path in _ANTHROPIC else _ENCODER_SETTINGS
    settings = {name: fields[name] for name in names if name in fields}
    reader = _reader(call, fields, settings, rules, find)
    read = {name: walk(reader, fields[name], name) for name, walk in walks.items()}
    if reader.count and path != CHAT_PATH and not rules.pd_takes_media:
        raise RequestError(
            "images, videos and audio clips are taken in chat requests only: the prefill+decode "
            f"instances hold no encoder; send them to {CHAT_PATH}",
            status=400,
            code="unsupported_part",
        )
    items = reader.items if path in _ENCODED_APART else ()
    if items and _uses_sound_of_videos(settings):
        items = tuple(item for item in items if item.modality not in _WITH_SOUND)
    return msgspec.structs.replace(
        call,
        changed=changed or any(value is not fields[name] for name, value in read.items()),
        fields={**fields, **read},
        settings=settings,
        items=items,
    )


_Fields = dict[str, msgspec.Raw]
_Walk = Callable[[MediaReader, msgspec.Raw, str], object]


def _walks(path: str, fields: _Fields) -> Mapping[str, _Walk]:
    """Return which fields of a request may hold items, and how each is read."""
    if path in (COMPLETION_PATH, DECISION_PATH):
        return {}
    if path == CHAT_PATH:
        return {"messages": MediaReader.chat}
    if path in _ANTHROPIC:
        return {"messages": MediaReader.anthropic}
    if path in _RESPONSES:
        return {"input": MediaReader.responses} if opens(fields["input"], b"[") else {}
    found: dict[str, _Walk] = {
        name: MediaReader.nested
        for name in _NESTED_PARTS & fields.keys()
        if b"{" in bytes(fields[name])
    }
    messages = MediaReader.batch if path == BATCH_PATH else MediaReader.chat
    for name, walk in (("messages", messages), (_IMAGES, MediaReader.urls)):
        if name in fields and opens(fields[name], b"["):
            found[name] = walk
    return found


def _check_fields(path: str, fields: _Fields) -> None:
    """Refuse a request without its prompt, or with media where none are taken."""
    if path in _PROMPTS:
        names, expected = _PROMPTS[path]
        if not names & fields.keys():
            raise RequestError(
                f"field {min(names)!r} is missing in the request body: give {expected}",
                status=400,
                code="missing_field",
            )
    for name in ("images", "audio", "videos") if path == DECISION_PATH else ():
        if (raw := _given(fields, name)) is not None and bytes(raw) != b"[]":
            raise RequestError(
                f"{name}: images, videos and audio clips are not taken at {DECISION_PATH}; send "
                f"them to {CHAT_PATH}",
                status=400,
                code="unsupported_part",
            )


def _reader(
    call: Call, fields: _Fields, settings: _Fields, rules: Rules, find: FindMedia | None
) -> MediaReader:
    """Return what finds the items of a call, and keys them by all that they depend on."""
    _check_commas(call.cut, MAX_MESSAGES_COMMAS)
    salt = b"".join(
        call.cut.whole(bytes(_given(given, name) or b"")) + b"\0"
        for given, name in [*((settings, name) for name in _ENCODER_SETTINGS), (fields, _SALT)]
    )
    enlarged = [
        check_settings(rules.limits, name, _given(settings, name)) for name in _ENCODER_SETTINGS
    ]
    max_items = min(rules.max_items, rules.limits.max_request_pixels // max(*enlarged, 1))
    return MediaReader(call.cut, salt=salt, max_items=max_items, find=find)


def _read_object(data: Data, rules: Rules) -> tuple[CutText, dict[str, msgspec.Raw], bool]:
    """Return the cut text, its checked top level, and whether something was dropped from it."""
    cut = CutText(data)
    _check_size(cut)
    try:
        fields = _object.decode(cut.small)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"request body: {error}; send one JSON object", status=400, code="invalid_body"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"request body of {len(data)} bytes, beginning with "
            f"{data[:32].decode('utf-8', 'replace')!r}, is not JSON in UTF-8: {error}",
            status=400,
            code="invalid_json",
        ) from error
    dropped = STRIPPED & fields.keys()
    if rules.takes_kv:
        dropped -= {KV}
    for name in dropped:
        del fields[name]
    _check_extra_arguments(fields)
    return cut, fields, bool(dropped)


def _check_size(cut: CutText) -> None:
    """Refuse a text that would hold up others while it is read, or take much memory."""
    nbytes = len(cut.small)
    if nbytes > MAX_JSON_BYTES:
        raise _too_much(f"{nbytes} bytes without its media and other long strings", MAX_JSON_BYTES)
    _check_commas(cut, MAX_COMMAS)
    if nbytes > 2 * MAX_STRINGS and (quotes := cut.count(b'"')) > 2 * MAX_STRINGS:
        strings = (quotes - cut.count(b'\\"')) // 2
        if strings > MAX_STRINGS:
            raise _too_much(f"{strings} strings", MAX_STRINGS)


def _check_commas(cut: CutText, most: int) -> None:
    if len(cut.small) > most and (commas := cut.count(b",")) > most:
        raise _too_much(f"{commas} commas", most)


def _too_much(found: str, most: int) -> RequestError:
    return RequestError(
        f"request body holds {found}: at most {most} are allowed; send fewer values, or less text",
        status=413,
        code="too_many_values",
    )


def _check_extra_arguments(fields: Mapping[str, msgspec.Raw]) -> None:
    """Refuse ``vllm_xargs`` that would pose as the router's own parameters inside the engine."""
    raw = _given(fields, "vllm_xargs")
    if raw is None:
        return
    given = decode(_object, raw, "vllm_xargs: expected an object of strings and numbers")
    forged = sorted(STRIPPED & given.keys())
    if forged:
        raise RequestError(
            f"vllm_xargs may not hold {forged}: these names are the router's own; remove them",
            status=400,
            code="invalid_field",
        )


def _uses_sound_of_videos(fields: Mapping[str, msgspec.Raw]) -> bool:
    raw = fields.get("mm_processor_kwargs")
    if raw is None:
        return False
    expected = "mm_processor_kwargs: give an object of the processor's settings"
    settings = decode(_settings, raw, expected)
    return settings is not None and bool(settings.get("use_audio_in_video"))


def _given(fields: Mapping[str, msgspec.Raw], name: str) -> msgspec.Raw | None:
    """Return a field's value; ``None`` if it is missing or null."""
    raw = fields.get(name)
    return None if raw is None or bytes(raw) == b"null" else raw
