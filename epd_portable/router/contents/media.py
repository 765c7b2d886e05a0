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
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from epd_portable.errors import RequestError
from epd_portable.media.addresses import is_web
from epd_portable.media.limits import Modality, estimated_pixels
from epd_portable.router.contents.cut_text import Bytes, CutText, decode, opens

Part = dict[str, msgspec.Raw]

MAX_HEADER_BYTES = 256
"""Longest ``data:<media type>;base64`` prefix that is looked at."""
MAX_PARTS = 20_000
"""Messages in a request, and parts in a message."""


FAMILIES: Mapping[Modality, frozenset[str]] = {
    "image": frozenset({"image"}),
    "video": frozenset({"video"}),
    # Of a video, the sound track is taken.
    "audio": frozenset({"audio", "video"}),
}
"""First halves of the media types that a data URL with an item of a modality can have."""
EXAMPLES: Mapping[Modality, str] = {
    "image": "image/png",
    "video": "video/mp4",
    "audio": "audio/wav",
}

FRAMES = "video/jpeg"
"""Media type of videos that are base64 texts of frames, with commas between them; all other types
the engine finds from the content."""
INPUT_AUDIO = "input_audio"
MODALITIES: Mapping[str, Modality] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    INPUT_AUDIO: "audio",
}
"""Fields of a part that hold an item (vLLM 0.26 to 0.33)."""
FIELDS: Mapping[str, str] = {"input_image": "image_url", **{name: name for name in MODALITIES}}
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
        part: Content part of a chat message with the item; cut. Where the request can name items to
            the engine, this is the client's own, with ``uuid`` set to `item_uuid`.
        pixels: About how many it has, by its bytes; for weighing load only. Sound has none.
    """

    item_uuid: str
    modality: Modality
    part: Part
    pixels: int = 0


FindMedia = Callable[[Bytes, str], Bytes | None]
"""Returns base64 text of what is at a URL in UTF-8; ``None`` if it has to be fetched first. Gets
its place in the request, too; raises `RequestError` for what is not fetched."""


class _Found(NamedTuple):
    """An item in a body.

    Attributes:
        data: Base64 text.
        written: JSON of a data URL, where the body does not hold the item as one.
        media_type: Of its data URL, if it came as one.
    """

    data: Bytes
    written: msgspec.Raw | None = None
    media_type: str = ""


_Read = Callable[[msgspec.Raw, str], object]
"""Reads a value at a place in the request, for messages."""


class MediaReader:
    """Finds every item of one request, and keys it.

    Values are JSON, cut; what needs no change is returned itself. Each method that reads some
    raises `RequestError` (400 or 413), which names the place, the value and the remedy.

    Args:
        salt: Whatever else an item may be shared by, such as settings that change the encoder's
            output; becomes part of every key.
        max_items: Most media parts allowed, repeated ones included.
        find: Finds what came by URL; ``None`` refuses such items. An item that is not there yet is
            counted, and is not among `items`.

    Attributes:
        count: Items that were found, repeated ones included.
    """

    def __init__(
        self, cut: CutText, *, salt: bytes = b"", max_items: int, find: FindMedia | None = None
    ) -> None:
        self._cut = cut
        self._salt = salt
        self._max_items = max_items
        self._find = find
        self._items: dict[str, MediaItem] = {}
        self.count = 0

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """Distinct items that were found, in the order of their first place in the prompt."""
        return tuple(self._items.values())

    def chat(self, raw: msgspec.Raw, where: str) -> object:
        """Read a list of messages."""
        return self._list(raw, where, self._message)

    def batch(self, raw: msgspec.Raw, where: str) -> object:
        """Read a list of conversations."""
        return self._list(raw, where, self.chat)

    def responses(self, raw: msgspec.Raw, where: str) -> object:
        """Read the input of OpenAI's responses; parts are in what tools gave, too."""
        return self._list(
            raw, where, lambda each, at: self._message(each, at, ("content", "output"))
        )

    def nested(self, raw: msgspec.Raw, where: str) -> object:
        """Read a value that may be a message, or a list with some."""

        def read(each: msgspec.Raw, at: str) -> object:
            return self._message(each, at) if opens(each, b"{") else each

        if opens(raw, b"["):
            return self._list(raw, where, read, most=math.inf)
        return read(raw, where)

    def urls(self, raw: msgspec.Raw, where: str) -> object:
        """Read a list of images' URLs."""
        return self._list(raw, where, self._image_url)

    def anthropic(self, raw: msgspec.Raw, where: str) -> object:
        """Read the messages of Anthropic's interface.

        Images have no names there; the engine names them by their content. It puts those in results
        of tools before the others of a message, and uses none of a system message.
        """
        return self._list(raw, where, self._anthropic_message)

    def _list(self, raw: msgspec.Raw, where: str, read: _Read, most: float = MAX_PARTS) -> object:
        given = decode(_raws, raw, where)
        if len(given) > most:
            raise RequestError(
                f"{where}: a list of {len(given)}: at most {most} are allowed; send fewer",
                status=413,
                code="too_many_values",
            )
        values = [read(each, f"{where}[{index}]") for index, each in enumerate(given)]
        return raw if all(map(operator.is_, values, given)) else values

    def _message(
        self, raw: msgspec.Raw, where: str, inside: tuple[str, ...] = ("content",)
    ) -> object:
        fields = decode(_object, raw, where)
        read = {
            name: self._list(fields[name], f"{where}.{name}", self._part)
            for name in inside
            if name in fields and opens(fields[name], b"[")
        }
        return _with(raw, fields, read)

    # Parts of OpenAI's interfaces.

    def _part(self, raw: msgspec.Raw, where: str) -> object:
        if not opens(raw, b"{"):
            return raw
        part = decode(_object, raw, where)
        kind = self._text(part, "type", where)
        refused = sorted(REFUSED_PARTS & {kind, *part})
        if refused:
            raise _refusal(
                where,
                f"{refused[0]} is not accepted from clients; send the item itself, for example as "
                "an image_url part with a data URL",
                code="unsupported_part",
            )
        name = _media_field(part, kind, where)
        if name is None:
            return raw if part.pop("uuid", None) is None else part
        place = f"{where}.{name}"
        self._count_one(place)
        modality = MODALITIES[name]
        if name == INPUT_AUDIO:
            found = _Found(self._input_audio(part.get(name), place))
        else:
            given, url = self._url(part.get(name), modality, place)
            by_url = self._by_url(url, modality, place)
            if by_url is None:
                return raw
            found, written = by_url, by_url.written
            if written is not None:
                part[name] = written if given is None else _json({**given, "url": written})
        part["uuid"] = _json(self._item(modality, found, part).item_uuid)
        return part

    def _url(
        self, raw: msgspec.Raw | None, modality: Modality, where: str
    ) -> tuple[Part | None, Bytes]:
        """Return an object that holds a URL, if one does, and the URL."""
        given: Part | None = None
        if raw is not None and opens(raw, b"{"):
            given = decode(_object, raw, where)
            raw = given.get("url")
            where = f"{where}.url"
        if raw is None:
            raise _missing(where, f"a data URL, data:{EXAMPLES[modality]};base64,<data>")
        return given, self._cut.text_bytes(raw, where)

    def _image_url(self, raw: msgspec.Raw, where: str) -> object:
        self._count_one(where)
        found = self._by_url(self._cut.text_bytes(raw, where), "image", where)
        return raw if found is None or found.written is None else found.written

    def _input_audio(self, raw: msgspec.Raw | None, where: str) -> Bytes:
        """Return base64 text; of the format the engine makes a data URL, so it must be a word."""
        expected = '{"data": "<base64 of the file>", "format": "wav"}'
        if raw is None:
            raise _missing(where, expected)
        fields = decode(_object, raw, where)
        for name in ("data", "format"):
            if name not in fields:
                raise _missing(f"{where}.{name}", f"the audio clip as {expected}")
        sort = self._cut.text(fields["format"], f"{where}.format").lower()
        if not _FORMAT.fullmatch(sort):
            raise _refusal(
                f"{where}.format: {sort[:32]!r}",
                "it is no audio format; write for example 'wav' or 'mp3'",
                code="invalid_part",
            )
        return self._base64(fields["data"], f"{where}.data")

    # Blocks of Anthropic's interface.

    def _anthropic_message(self, raw: msgspec.Raw, where: str) -> object:
        fields = decode(_object, raw, where)
        content = fields.get("content")
        role = self._text(fields, "role", where)
        if role == "system" or content is None or not opens(content, b"["):
            return raw
        results = self._tool_result if role == "user" else lambda each, at: each
        read = self._list(content, f"{where}.content", results)
        given = read if isinstance(read, list) else decode(_raws, content, where)
        blocks = [
            self._image(each, f"{where}.content[{index}]")
            if isinstance(each, msgspec.Raw)
            else each
            for index, each in enumerate(given)
        ]
        same = read is content and all(map(operator.is_, blocks, given))
        return _with(raw, fields, {"content": content if same else blocks})

    def _tool_result(self, raw: msgspec.Raw, where: str) -> object:
        fields = self._block(raw, where, "tool_result")
        content = fields.get("content")
        if content is None or not opens(content, b"["):
            return raw
        return _with(raw, fields, {"content": self._list(content, f"{where}.content", self._image)})

    def _image(self, raw: msgspec.Raw, where: str) -> object:
        fields = self._block(raw, where, "image")
        source = fields.get("source")
        if source is None or not opens(source, b"{"):
            return raw
        where = f"{where}.source"
        self._count_one(where)
        given = decode(_object, source, where)
        by_url = self._text(given, "type", where) == "url"
        found = self._by_source_url(given, where) if by_url else self._by_source_data(given, where)
        if found is None:
            return raw
        assert found.written is not None
        image_url = msgspec.Raw(b'{"url":%b}' % bytes(found.written))
        part = {"type": msgspec.Raw(b'"image_url"'), "image_url": image_url}
        self._item("image", found, part)
        read = _with(source, given, {"url": found.written} if by_url else {})
        return _with(raw, fields, {"source": read})

    def _block(self, raw: msgspec.Raw, where: str, kind: str) -> Part:
        """Return the fields of a block of one kind; of any other, none."""
        fields = decode(_object, raw, where) if opens(raw, b"{") else {}
        return fields if self._text(fields, "type", where) == kind else {}

    def _by_source_url(self, source: Part, where: str) -> _Found | None:
        where = f"{where}.url"
        if "url" not in source:
            raise _missing(where, f"a data URL, data:{EXAMPLES['image']};base64,<data>")
        found = self._by_url(self._cut.text_bytes(source["url"], where), "image", where)
        if found is None or found.written is not None:
            return found
        return found._replace(written=source["url"])

    def _by_source_data(self, source: Part, where: str) -> _Found:
        if "data" not in source:
            raise _missing(f"{where}.data", "the base64 text of the file")
        media_type = self._text(source, "media_type", where) or "image/jpeg"
        if not _IMAGE_TYPE.fullmatch(media_type):
            raise _refusal(
                f"{where}.media_type: {media_type[:48]!r}",
                f"it is no image; write for example {EXAMPLES['image']}",
            )
        data = self._base64(source["data"], f"{where}.data")
        return _Found(data, _data_url(media_type, bytes(source["data"])[1:-1]))

    # What both need.

    def _text(self, fields: Part, name: str, where: str) -> str | None:
        """Return a field that holds a text; ``None`` if it is missing."""
        return self._cut.text(fields[name], f"{where}.{name}") if name in fields else None

    def _base64(self, raw: msgspec.Raw, where: str) -> Bytes:
        data = self._cut.text_bytes(raw, where)
        if not data:
            raise _no_data(where)
        return data

    def _by_url(self, url: Bytes, modality: Modality, place: str) -> _Found | None:
        """Return what is at a URL; ``None`` if it has to be fetched first."""
        if self._find is None or not is_web(bytes(url[:6])):
            media_type, data = split_data_url(url, modality, place)
            return _Found(data, media_type=media_type)
        fetched = self._find(url, place)
        if fetched is None:
            return None
        # Of what type it is the engine finds from its content.
        url_of = _data_url(f"{modality}/octet-stream", self._cut.stand_in(fetched))
        return _Found(fetched, url_of)

    def _count_one(self, place: str) -> None:
        self.count += 1
        if self.count > self._max_items:
            raise _refusal(
                place,
                f"item {self.count} of one request: at most {self._max_items} images, videos and "
                "audio clips are allowed; send fewer, enlarge them less, or raise "
                "router.max_media_items or max_request_pixels",
                code="too_many_items",
            )

    def _item(self, modality: Modality, found: _Found, part: Part) -> MediaItem:
        """Return the item of a part, the same for each part with it."""
        kind = FRAMES if modality == "video" and found.media_type == FRAMES else modality
        item_uuid = content_key(kind, found.data, self._salt)
        pixels = estimated_pixels(modality, len(found.data))
        item = MediaItem(item_uuid=item_uuid, modality=modality, part=part, pixels=pixels)
        return self._items.setdefault(item_uuid, item)


def content_key(kind: str, base64_text: Bytes, salt: bytes = b"") -> str:
    """Return 64 hexadecimal digits that name an item by its content.

    Args:
        kind: Its modality, or `FRAMES`: how the engine reads the content depends on nothing else.
    """
    digest = hashlib.sha256()
    for field in (kind.encode(), salt, base64_text):
        digest.update(b"%d:" % len(field))
        digest.update(field)
    return digest.hexdigest()


def split_data_url(url: Bytes, modality: Modality, where: str) -> tuple[str, Bytes]:
    """Return media type and base64 text of an item's data URL.

    Args:
        url: The URL, in UTF-8.
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
            f"router.media_urls.allowed_domains{empty}; inline the {modality} as "
            f"data:{EXAMPLES[modality]};base64,<base64 of the file>",
            code="unsupported_url",
        )
    comma = head.find(b",")
    if comma < 0:
        raise _refusal(
            place,
            "the data URL has no ',' before its data; write "
            f"data:{EXAMPLES[modality]};base64,<data>",
        )
    media_type, _, parameters = head[5:comma].decode("ascii", "replace").partition(";")
    media_type = media_type.lower()
    family, _, subtype = media_type.partition("/")
    if family not in FAMILIES[modality] or not subtype:
        raise _refusal(
            place,
            f"media type {media_type!r} is no {modality}; write for example {EXAMPLES[modality]}",
        )
    if parameters.rpartition(";")[2] != "base64":
        raise _refusal(place, "the data URL is not base64; write ';base64' before the ','")
    data = url[comma + 1 :]
    if not data:
        raise _no_data(place)
    return media_type, data


def _with(raw: msgspec.Raw, fields: Part, read: Mapping[str, object]) -> object:
    """Return an object with other values in some fields; itself if they are the same."""
    return raw if all(read[name] is fields[name] for name in read) else {**fields, **read}


def _json(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _data_url(media_type: str, text: bytes) -> msgspec.Raw:
    """Return a data URL as JSON."""
    return msgspec.Raw(b'"data:%b;base64,%b"' % (media_type.encode(), text))


def _media_field(part: Part, kind: str | None, where: str) -> str | None:
    """Return the field of a part that holds its item, by its type and the fields it has."""
    present = sorted(MODALITIES.keys() & part.keys())
    expected = FIELDS.get(kind) if kind is not None else None
    if len(present) > 1:
        problem = f"one part holds {' and '.join(present)}; give each item a part of its own"
        raise _refusal(where, problem, code="invalid_part")
    if present and kind is not None and expected != present[0]:
        raise _refusal(
            where,
            f"a part of type {kind[:64]!r} holds {present[0]}; its type must be {present[0]!r}",
            code="invalid_part",
        )
    return present[0] if present else expected


def _missing(where: str, expected: str) -> RequestError:
    return RequestError(f"{where} is missing: give {expected}", status=400, code="invalid_part")


def _no_data(place: str) -> RequestError:
    return _refusal(place, "it holds no data; give the base64 text of the file")


def _refusal(place: str, problem: str, *, code: str = "invalid_data_url") -> RequestError:
    return RequestError(f"{place}: {problem}", status=400, code=code)
