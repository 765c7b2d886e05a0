"""Images, videos and audio clips in messages: found, checked, and keyed by content. Pure.

The engine's caches trust the ``uuid`` of an item, so a client's own is replaced (media) or removed
(everything else): with a forged one, a request could read or overwrite what belongs to another.

Media come as base64: in data URLs, or as ``input_audio`` has it. Of the base64 text only the engine
that decodes it finds whether it is valid. What comes by ``http(s)`` URL was fetched before, is put
into the place of its URL as if the client had, and is an item like any other. Parts that hold
embeddings are refused, and so is a part with two items: the engine would look at one of them only,
and not necessarily at the one that was keyed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from epd_portable.errors import RequestError
from epd_portable.media.addresses import is_web
from epd_portable.media.limits import Modality, estimated_pixels
from epd_portable.router.contents.cut_text import Bytes, CutText, decode, opens
from epd_portable.wire.params import EncodedItem

Part = dict[str, msgspec.Raw]

MAX_HEADER_BYTES = 256
"""Longest ``data:<media type>;base64`` prefix that is looked at."""
MAX_PARTS = 20_000
"""Messages in a request, and parts in a message."""
MEDIA_SUFFIX = "-media"
"""What is added to an item's name when its media are sent after its metadata."""


class MediaKind(msgspec.Struct, frozen=True, kw_only=True):
    """What may stand in an item's data URL.

    Attributes:
        modality: What the item is to the model.
        families: First halves of the media types that can hold it.
        example: One of these media types.
    """

    modality: Modality
    families: frozenset[str]
    example: str


IMAGE = MediaKind(modality="image", families=frozenset({"image"}), example="image/png")
VIDEO = MediaKind(modality="video", families=frozenset({"video"}), example="video/mp4")
# Of a video, the sound track is taken.
AUDIO = MediaKind(modality="audio", families=frozenset({"audio", "video"}), example="audio/wav")

INPUT_AUDIO = "input_audio"
KINDS: Mapping[str, MediaKind] = {
    "image_url": IMAGE,
    "video_url": VIDEO,
    "audio_url": AUDIO,
    INPUT_AUDIO: AUDIO,
}
"""Fields of a part that hold an item (vLLM 0.26 to 0.33)."""
FIELDS: Mapping[str, str] = {"input_image": "image_url", **{name: name for name in KINDS}}
"""Types of parts with an item, and the field that holds it."""
REFUSED_PARTS = frozenset(
    {"image_embeds", "video_embeds", "audio_embeds", "prompt_embeds", "image_pil"}
)

_IMAGE_TYPE = re.compile(r"image/[a-zA-Z0-9.+-]{1,64}")
_FORMAT = re.compile(r"[a-z0-9][a-z0-9.+-]{0,31}")

_raws = msgspec.json.Decoder(list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct item of a request.

    Attributes:
        item_uuid: 64 hexadecimal digits that depend on modality, content and salt alone.
        modality: What it is to the model.
        part: Content part of a chat message with the item; cut. Where the request can name items to
            the engine, this is the client's own, with ``uuid`` set to `item_uuid`.
        pixels: About how many it has, by its bytes; for weighing load only. Sound has none.
    """

    item_uuid: str
    modality: Modality
    part: Part
    pixels: int = 0


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages ready for an instance.

    Attributes:
        messages: To be sent, as cut JSON values; what needed no change is the client's own.
        changed: Whether `messages` differs from what the client sent.
    """

    messages: Sequence[object]
    changed: bool


class LinkedMedia(Protocol):
    """What one request names by URL, as far as it has been fetched."""

    def find(self, url: Bytes, modality: Modality, where: str) -> tuple[str, Bytes] | None:
        """Return media type and base64 text; ``None`` if it has to be fetched first.

        Args:
            url: The URL, in UTF-8.
            modality: What it is to the model.
            where: Its place in the request, for messages.

        Raises:
            RequestError: 4xx; it is not fetched, or is no file of this modality.
        """

    def key(self, where: str, make: Callable[[], str]) -> str:
        """Return what names the item at a place; made once, however often the request is read."""


class MediaReader:
    """Finds every item of one request, and keys it.

    Args:
        cut: The request's body.
        salt: Whatever else an item may be shared by, such as settings that change the encoder's
            output; becomes part of every key.
        max_items: Most media parts allowed, repeated ones included.
        linked: What came by URL; ``None`` refuses such items. An item that it does not have yet is
            counted, and is not among `items`.

    Attributes:
        count: Items that were found, repeated ones included.
    """

    def __init__(
        self,
        cut: CutText,
        *,
        salt: bytes = b"",
        max_items: int,
        linked: LinkedMedia | None = None,
    ) -> None:
        self._cut = cut
        self._salt = salt
        self._max_items = max_items
        self._linked = linked
        self._items: dict[str, MediaItem] = {}
        self.count = 0

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """Distinct items that were found, in the order of their first place in the prompt."""
        return tuple(self._items.values())

    def conversation(
        self, raw: msgspec.Raw, where: str = "messages", inside: tuple[str, ...] = ("content",)
    ) -> Conversation:
        """Return a list of messages with keys in them.

        Args:
            raw: The list.
            where: Its place in the request, for messages.
            inside: Fields of a message that may be lists of parts.

        Raises:
            RequestError: 400; names the place, the value and the remedy.
        """
        given = _array(raw, where)
        messages = [self._message(each, f"{where}[{i}]", inside) for i, each in enumerate(given)]
        changed = any(new is not old for new, old in zip(messages, given, strict=True))
        return Conversation(messages=messages, changed=changed)

    def batch(self, raw: msgspec.Raw) -> Conversation:
        """Return a list of conversations with keys in them.

        Raises:
            RequestError: As `conversation`.
        """
        given = enumerate(_array(raw, "messages"))
        read = [self.conversation(each, f"messages[{index}]") for index, each in given]
        return Conversation(
            messages=[each.messages for each in read], changed=any(each.changed for each in read)
        )

    def nested_parts(self, raw: msgspec.Raw, where: str) -> object:
        """Return a value that may be a message, or a list with some, with keys in it.

        Raises:
            RequestError: As `conversation`.
        """
        alone = not opens(raw, b"[")
        given = [raw] if alone else decode(_raws, raw, where)
        read = [
            self._message(each, where if alone else f"{where}[{i}]", ("content",))
            if opens(each, b"{")
            else each
            for i, each in enumerate(given)
        ]
        if all(new is old for new, old in zip(read, given, strict=True)):
            return raw
        return read[0] if alone else read

    def urls(self, raw: msgspec.Raw, where: str) -> object:
        """Return a list of images' URLs; what came by URL is in its place.

        Raises:
            RequestError: As `conversation`.
        """
        given = _array(raw, where)
        read: list[msgspec.Raw] = []
        for index, each in enumerate(given):
            place = f"{where}[{index}]"
            self._count_one(place)
            url = self._cut.text_bytes(each, place)
            found = self._by_url(url, IMAGE, place)
            if found is None:
                read.append(each)
                continue
            _, _, written = found
            read.append(each if written is None else msgspec.Raw(written))
        same = all(new is old for new, old in zip(read, given, strict=True))
        return raw if same else read

    def anthropic(self, raw: msgspec.Raw) -> Conversation:
        """Return the ``messages`` of Anthropic's interface, after finding the images in them.

        They have no names there; the engine names them by their content. It puts those in results
        of tools before the others of a message, and uses none of a system message.

        Raises:
            RequestError: As `conversation`.
        """
        given = _array(raw, "messages")
        messages = [self._anthropic(each, f"messages[{i}]") for i, each in enumerate(given)]
        changed = any(new is not old for new, old in zip(messages, given, strict=True))
        return Conversation(messages=messages, changed=changed)

    def _anthropic(self, raw: msgspec.Raw, where: str) -> msgspec.Raw | dict[str, object]:
        fields = decode(_object, raw, where)
        content = fields.get("content")
        role = self._cut.text(fields["role"], f"{where}.role") if "role" in fields else None
        if role == "system" or content is None or not opens(content, b"["):
            return raw
        blocks = self._blocks(content, f"{where}.content")
        if role == "user":
            for block in blocks:
                inner = block.fields.get("content") if block.kind == "tool_result" else None
                if inner is not None and opens(inner, b"["):
                    results = self._blocks(inner, f"{block.place}.content")
                    self._images(results)
                    if any(each.changed for each in results):
                        block.put("content", _written(results))
        self._images(blocks)
        if not any(each.changed for each in blocks):
            return raw
        return {**fields, "content": _written(blocks)}

    def _message(
        self, raw: msgspec.Raw, where: str, inside: tuple[str, ...]
    ) -> msgspec.Raw | dict[str, object]:
        fields = decode(_object, raw, where)
        touched: dict[str, object] = {}
        for name in inside:
            content = fields.get(name)
            if content is None or not opens(content, b"["):
                continue
            parts = _array(content, f"{where}.{name}")
            read = [self._part(part, f"{where}.{name}[{i}]") for i, part in enumerate(parts)]
            if any(new is not part for new, part in zip(read, parts, strict=True)):
                touched[name] = read
        return {**fields, **touched} if touched else raw

    def _part(self, raw: msgspec.Raw, where: str) -> msgspec.Raw | Part:
        if not opens(raw, b"{"):
            return raw
        part = decode(_object, raw, where)
        kind = self._cut.text(part["type"], f"{where}.type") if "type" in part else None
        refused = sorted(REFUSED_PARTS & {kind, *part})
        if refused:
            raise RequestError(
                f"{where}: {refused[0]} is not accepted from clients; send the item itself, for "
                "example as an image_url part with a data URL",
                status=400,
                code="unsupported_part",
            )
        name = _media_field(part, kind, where)
        if name is None:
            return raw if part.pop("uuid", None) is None else part
        place = f"{where}.{name}"
        self._count_one(place)
        modality = KINDS[name].modality
        if name == INPUT_AUDIO:
            media_type, data = self._input_audio(part.get(name), place)
        else:
            url = self._url(part.get(name), KINDS[name], place)
            found = self._by_url(url, KINDS[name], place)
            if found is None:
                return raw
            media_type, data, written = found
            if written is not None:
                part[name] = self._with_url(part[name], written)
        item = self._item(modality, media_type, data, place, part)
        part["uuid"] = msgspec.Raw(b'"%b"' % item.item_uuid.encode())
        return part

    def _by_url(
        self, url: Bytes, kind: MediaKind, place: str
    ) -> tuple[str, Bytes, bytes | None] | None:
        """Return media type, base64 text, and JSON of the data URL if it takes the URL's place.

        ``None`` if it has to be fetched first.
        """
        if self._linked is None or not is_web(bytes(url[:6])):
            return *split_data_url(url, kind, place), None
        found = self._linked.find(url, kind.modality, place)
        if found is None:
            return None
        media_type, data = found
        return media_type, data, _data_url(media_type, self._cut.stand_in(data))

    def _with_url(self, raw: msgspec.Raw, written: bytes) -> msgspec.Raw:
        """Return what holds a URL with another one, given as JSON."""
        if not opens(raw, b"{"):
            return msgspec.Raw(written)
        fields = decode(_object, raw, "url")
        fields["url"] = msgspec.Raw(written)
        return msgspec.Raw(msgspec.json.encode(fields))

    def _blocks(self, raw: msgspec.Raw, where: str) -> list[_Block]:
        blocks = []
        for index, each in enumerate(_array(raw, where)):
            place = f"{where}[{index}]"
            fields = decode(_object, each, place) if opens(each, b"{") else {}
            kind = self._cut.text(fields["type"], f"{place}.type") if "type" in fields else None
            blocks.append(_Block(raw=each, place=place, kind=kind, fields=fields))
        return blocks

    def _images(self, blocks: list[_Block]) -> None:
        for block in blocks:
            source = block.fields.get("source") if block.kind == "image" else None
            if source is None or not opens(source, b"{"):
                continue
            where = f"{block.place}.source"
            self._count_one(where)
            fields = decode(_object, source, where)
            found = self._source(fields, where)
            if found is None:
                continue
            media_type, data, url = found
            part = {
                "type": msgspec.Raw(b'"image_url"'),
                "image_url": msgspec.Raw(b'{"url":%b}' % url),
            }
            if "url" in fields and url != bytes(fields["url"]):
                block.put("source", {**fields, "url": msgspec.Raw(url)})
            self._item("image", media_type, data, where, part)

    def _source(self, source: Part, where: str) -> tuple[str, Bytes, bytes] | None:
        """Return media type, base64 text and JSON of the data URL that the engine makes of it.

        ``None`` if it has to be fetched first.
        """
        kind = self._cut.text(source["type"], f"{where}.type") if "type" in source else None
        if kind == "url":
            where = f"{where}.url"
            if "url" not in source:
                raise _missing(where, f"a data URL, data:{IMAGE.example};base64,<data>")
            url = self._cut.text_bytes(source["url"], where)
            found = self._by_url(url, IMAGE, where)
            if found is None:
                return None
            media_type, data, written = found
            return media_type, data, bytes(source["url"]) if written is None else written
        if "data" not in source:
            raise _missing(f"{where}.data", "the base64 text of the file")
        media_type = "image/jpeg"
        if "media_type" in source:
            media_type = self._cut.text(source["media_type"], f"{where}.media_type")
        if not _IMAGE_TYPE.fullmatch(media_type):
            raise _refusal(
                f"{where}.media_type: {media_type[:48]!r}",
                f"it is no image; write for example {IMAGE.example}",
            )
        data = self._cut.text_bytes(source["data"], f"{where}.data")
        if not data:
            raise _no_data(f"{where}.data")
        return media_type.lower(), data, _data_url(media_type, bytes(source["data"])[1:-1])

    def _count_one(self, place: str) -> None:
        self.count += 1
        if self.count > self._max_items:
            raise RequestError(
                f"{place}: item {self.count} of one request: at most {self._max_items} images, "
                "videos and audio clips are allowed; send fewer, enlarge them less, or raise "
                "router.max_media_items or max_request_pixels",
                status=400,
                code="too_many_items",
            )

    def _item(
        self, modality: Modality, media_type: str, data: Bytes, place: str, part: Part
    ) -> MediaItem:
        """Return the item of a part, the same for each part with it."""

        def key() -> str:
            return content_key(modality, media_type, data, self._salt)

        item_uuid = self._linked.key(place, key) if self._linked else key()
        pixels = estimated_pixels(modality, len(data))
        item = MediaItem(item_uuid=item_uuid, modality=modality, part=part, pixels=pixels)
        return self._items.setdefault(item_uuid, item)

    def _url(self, raw: msgspec.Raw | None, kind: MediaKind, where: str) -> Bytes:
        if raw is not None and opens(raw, b"{"):
            raw = decode(_object, raw, where).get("url")
            where = f"{where}.url"
        if raw is None:
            raise _missing(where, f"a data URL, data:{kind.example};base64,<data>")
        return self._cut.text_bytes(raw, where)

    def _input_audio(self, raw: msgspec.Raw | None, where: str) -> tuple[str, Bytes]:
        """Return media type and base64 text, as if the clip had come as a data URL."""
        expected = '{"data": "<base64 of the file>", "format": "wav"}'
        if raw is None:
            raise _missing(where, expected)
        fields = decode(_object, raw, where)
        for name in ("data", "format"):
            if name not in fields:
                raise _missing(f"{where}.{name}", f"the audio clip as {expected}")
        sort = self._cut.text(fields["format"], f"{where}.format").lower()
        if not _FORMAT.fullmatch(sort):
            raise RequestError(
                f"{where}.format: {sort[:32]!r} is no audio format; write for example 'wav' or "
                "'mp3'",
                status=400,
                code="invalid_part",
            )
        data = self._cut.text_bytes(fields["data"], f"{where}.data")
        if not data:
            raise _no_data(f"{where}.data")
        return f"audio/{sort}", data


def content_key(modality: Modality, media_type: str, base64_text: Bytes, salt: bytes = b"") -> str:
    """Return 64 hexadecimal digits that name an item by its content."""
    digest = hashlib.sha256()
    for field in (modality.encode(), media_type.encode(), salt, base64_text):
        digest.update(b"%d:" % len(field))
        digest.update(field)
    return digest.hexdigest()


def split_data_url(url: Bytes, kind: MediaKind, where: str) -> tuple[str, Bytes]:
    """Return media type and base64 text of an item's data URL.

    Args:
        url: The URL, in UTF-8.
        kind: What it must hold.
        where: Its place in the request, for messages.

    Raises:
        RequestError: 400; it is no data URL, not said to be base64, empty, or not of this kind.
    """
    head = bytes(url[:MAX_HEADER_BYTES])
    shown = repr(head[:48].decode("utf-8", "replace")) + ("…" if len(url) > 48 else "")
    place = f"{where}: {shown}"
    if head[:5].lower() != b"data:":
        empty = ", which names none" if is_web(head) else ""
        raise _refusal(
            place,
            "only data URLs are taken, and http(s) URLs of hosts in "
            f"router.media_urls.allowed_domains{empty}; inline the {kind.modality} as "
            f"data:{kind.example};base64,<base64 of the file>",
            code="unsupported_url",
        )
    comma = head.find(b",")
    if comma < 0:
        raise _refusal(
            place,
            f"the data URL has no ',' before its data; write data:{kind.example};base64,<data>",
        )
    media_type, _, parameters = head[5:comma].decode("ascii", "replace").partition(";")
    media_type = media_type.lower()
    family, _, subtype = media_type.partition("/")
    if family not in kind.families or not subtype:
        raise _refusal(
            place,
            f"media type {media_type!r} is no {kind.modality}; write for example {kind.example}",
        )
    if parameters.rpartition(";")[2] != "base64":
        raise _refusal(place, "the data URL is not base64; write ';base64' before the ','")
    data = url[comma + 1 :]
    if not data:
        raise _no_data(place)
    return media_type, data


class _Block(msgspec.Struct, kw_only=True):
    """A block of Anthropic's content; one that is no object has no fields."""

    raw: msgspec.Raw
    place: str
    kind: str | None
    fields: Part
    changed: bool = False

    def put(self, name: str, value: object) -> None:
        """Put a value into a field."""
        self.fields[name] = msgspec.Raw(msgspec.json.encode(value))
        self.changed = True


def _written(blocks: Iterable[_Block]) -> list[object]:
    return [each.fields if each.changed else each.raw for each in blocks]


def _data_url(media_type: str, text: bytes) -> bytes:
    """Return a data URL as JSON."""
    return b'"data:%b;base64,%b"' % (media_type.encode(), text)


def with_metadata(messages: Iterable[object], encoded: Mapping[str, EncodedItem]) -> list[object]:
    """Return messages in which every keyed part holds metadata in place of its media.

    Args:
        messages: As `Conversation.messages`.
        encoded: By the name that the router gave the item; with metadata.
    """

    def without_media(name: str, part: Part) -> object:
        item = encoded.get(name)
        if item is None:
            return part
        kind = f"{item.modality}_embeds"
        return {"type": kind, kind: item.metadata, "uuid": name}

    return [_rewritten(message, without_media) for message in messages]


def renamed(
    messages: Iterable[object], items: Iterable[MediaItem]
) -> tuple[list[object], tuple[MediaItem, ...]]:
    """Return messages and items with names that no metadata was sent under.

    The engine keeps what its front end made of an item under the item's name. Made from metadata
    alone, it holds no pixels, and no later request with the media would bring them: the media of
    an item whose metadata an instance may have seen go to it under a name of their own.
    """

    def with_other_name(name: str, part: Part) -> Part:
        return {**part, "uuid": msgspec.Raw(msgspec.json.encode(name + MEDIA_SUFFIX))}

    moved = tuple(
        msgspec.structs.replace(
            item,
            item_uuid=item.item_uuid + MEDIA_SUFFIX,
            part=with_other_name(item.item_uuid, item.part),
        )
        for item in items
    )
    return [_rewritten(message, with_other_name) for message in messages], moved


def without(messages: Iterable[object], missing: Mapping[str, Modality]) -> list[object]:
    """Return messages in which a text says that an item is missing.

    Args:
        messages: As `Conversation.messages`.
        missing: Their modalities, by the name that the router gave them.
    """

    def noted(name: str, part: Part) -> object:
        if name not in missing:
            return part
        return {"type": "text", "text": f"[{missing[name]} not available]"}

    return [_rewritten(message, noted) for message in messages]


def _rewritten(message: object, write: Callable[[str, Part], object]) -> object:
    """Apply ``write`` to the keyed parts; only those are dictionaries with a name."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    content = [
        write(msgspec.json.decode(part["uuid"], type=str), part)
        if isinstance(part, dict) and "uuid" in part
        else part
        for part in message["content"]
    ]
    return {**message, "content": content}


def _array(raw: msgspec.Raw, where: str) -> list[msgspec.Raw]:
    values = decode(_raws, raw, where)
    if len(values) > MAX_PARTS:
        raise RequestError(
            f"{where}: a list of {len(values)}: at most {MAX_PARTS} are allowed; send fewer",
            status=413,
            code="too_many_values",
        )
    return values


def _media_field(part: Part, kind: str | None, where: str) -> str | None:
    """Return the field of a part that holds its item, by its type and the fields it has."""
    present = sorted(KINDS.keys() & part.keys())
    expected = FIELDS.get(kind) if kind is not None else None
    if len(present) > 1:
        raise RequestError(
            f"{where}: one part holds {' and '.join(present)}; give each item a part of its own",
            status=400,
            code="invalid_part",
        )
    if present and kind is not None and expected != present[0]:
        raise RequestError(
            f"{where}: a part of type {kind[:64]!r} holds {present[0]}; its type must be "
            f"{present[0]!r}",
            status=400,
            code="invalid_part",
        )
    return present[0] if present else expected


def _missing(where: str, expected: str) -> RequestError:
    return RequestError(f"{where} is missing: give {expected}", status=400, code="invalid_part")


def _no_data(place: str) -> RequestError:
    return _refusal(place, "it holds no data; give the base64 text of the file")


def _refusal(place: str, problem: str, *, code: str = "invalid_data_url") -> RequestError:
    return RequestError(f"{place}: {problem}", status=400, code=code)
