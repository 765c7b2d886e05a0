"""Images in chat messages: found, checked, and keyed by content. Pure.

The engine's caches trust the ``uuid`` of an item, so a client's own is replaced (images) or removed
(everything else): with a forged one, a request could read or overwrite what belongs to another.

Images must come as base64 data URLs. Video and audio parts go to the prefill+decode instance as
they are, which encodes them itself. Parts that hold embeddings are refused.
"""

from __future__ import annotations

import hashlib
import re
from typing import TypeVar

import msgspec

from epd_portable.errors import RequestError

IMAGE_TYPES = frozenset({"image_url", "input_image"})
REFUSED_PARTS = frozenset(
    {"image_embeds", "video_embeds", "audio_embeds", "prompt_embeds", "image_pil"}
)
MAX_HEADER_BYTES = 256
"""Longest ``data:<media type>;base64`` prefix that is looked at."""

_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")
_ESCAPE = re.compile(rb"\\")

T = TypeVar("T")
Part = dict[str, msgspec.Raw]
Bytes = bytes | memoryview
"""Views where it matters: every copy of an image costs more than what is looked up in it."""

_text_decoder = msgspec.json.Decoder(str)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct image of a request.

    Attributes:
        mm_hash: 64 hexadecimal digits that depend on the content alone.
        part: The content part as the client sent it, with ``uuid`` set to `mm_hash`.
    """

    mm_hash: str
    part: Part


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages ready for an instance.

    Attributes:
        messages: To be sent, as JSON values; what needed no change is the client's own bytes.
        items: Distinct images in the order of their first place.
        changed: Whether `messages` differs from what the client sent.
    """

    messages: list[object]
    items: tuple[MediaItem, ...]
    changed: bool


def read_conversation(raw: msgspec.Raw, *, salt: bytes = b"", max_items: int) -> Conversation:
    """Find every image, key it, and write the keys into the messages.

    Args:
        raw: The ``messages`` field of a chat request.
        salt: Whatever else the encoder's output depends on; becomes part of every key.
        max_items: Most image parts allowed, repeated ones included.

    Raises:
        RequestError: 400; names the place, the value and the remedy.
    """
    items: dict[str, MediaItem] = {}
    messages: list[object] = []
    changed = False
    count = 0
    for index, message in enumerate(_array(raw, "messages")):
        fields = _fields(message, f"messages[{index}]")
        content = fields.get("content")
        if content is None or not _opens(content, b"["):
            messages.append(message)
            continue
        where = f"messages[{index}].content"
        parts: list[object] = []
        touched = False
        for place, part in enumerate(_array(content, where)):
            rewritten, item = _read_part(part, f"{where}[{place}]", salt)
            if item is not None:
                count += 1
                items.setdefault(item.mm_hash, item)
            touched |= rewritten is not part
            parts.append(rewritten)
        changed |= touched
        messages.append({**fields, "content": parts} if touched else message)
    if count > max_items:
        raise RequestError(
            f"{count} images in one request: at most {max_items} are allowed; send fewer, or raise "
            "router.max_media_items",
            status=400,
            code="too_many_images",
        )
    return Conversation(messages=messages, items=tuple(items.values()), changed=changed)


def content_key(media_type: str, base64_text: Bytes, salt: bytes = b"") -> str:
    """Return 64 hexadecimal digits that name an image by its content."""
    digest = hashlib.sha256()
    for field in (media_type.encode(), salt, base64_text):
        digest.update(b"%d:" % len(field))
        digest.update(field)
    return digest.hexdigest()


def split_data_url(url: Bytes, where: str) -> tuple[str, Bytes]:
    """Return media type and base64 text of an image's data URL.

    Raises:
        RequestError: 400; it is no data URL, not base64, empty, or not of an image.
    """
    head = bytes(url[:MAX_HEADER_BYTES])
    shown = repr(head[:48].decode("utf-8", "replace")) + ("…" if len(url) > 48 else "")

    def refuse(problem: str, code: str = "invalid_data_url") -> RequestError:
        return RequestError(f"{where}: {shown}: {problem}", status=400, code=code)

    if head[:5].lower() != b"data:":
        raise refuse(
            "only data URLs are supported by this version; inline the image as "
            "data:image/png;base64,<base64 of the file>",
            code="unsupported_url",
        )
    comma = head.find(b",")
    if comma < 0:
        raise refuse("the data URL has no ',' before its data; write data:image/png;base64,<data>")
    media_type, _, parameters = head[5:comma].decode("ascii", "replace").partition(";")
    media_type = media_type.lower()
    if not media_type.startswith("image/") or len(media_type) == len("image/"):
        raise refuse(f"media type {media_type!r} is no image; write for example image/png")
    if parameters.rpartition(";")[2] != "base64":
        raise refuse("the data URL is not base64; write ';base64' before the ','")
    data = url[comma + 1 :]
    if not data:
        raise refuse("the data URL holds no data after the ','")
    if not _BASE64.fullmatch(data):
        found = _BASE64.match(data)
        assert found is not None
        wrong = bytes(data[found.end() : found.end() + 1]).decode("latin-1")
        raise refuse(
            f"character {wrong!r} at position {found.end()} of the data is not allowed in base64 "
            "there; use A-Z, a-z, 0-9, '+', '/' and '=' at the end, no line breaks"
        )
    if len(data) % 4:
        raise refuse(
            f"{len(data)} characters of base64 data are not a multiple of 4: the data is cut off, "
            "or its '=' padding is missing"
        )
    return media_type, data


def _read_part(raw: msgspec.Raw, where: str, salt: bytes) -> tuple[object, MediaItem | None]:
    if not _opens(raw, b"{"):
        return raw, None
    part = _fields(raw, where)
    kind = _text(part["type"], f"{where}.type") if "type" in part else None
    refused = sorted(REFUSED_PARTS & ({kind} | part.keys()))
    if refused:
        raise RequestError(
            f"{where}: {refused[0]} is not accepted from clients; send the image itself as an "
            "image_url part with a data URL",
            status=400,
            code="unsupported_part",
        )
    if kind not in IMAGE_TYPES and "image_url" not in part:
        if "uuid" not in part:
            return raw, None
        del part["uuid"]
        return part, None
    if kind is not None and kind not in IMAGE_TYPES:
        raise RequestError(
            f"{where}: a part of type {kind[:64]!r} holds image_url; its type must be 'image_url'",
            status=400,
            code="invalid_part",
        )
    place = f"{where}.image_url"
    media_type, data = split_data_url(_url(part.get("image_url"), place), place)
    mm_hash = content_key(media_type, data, salt)
    part["uuid"] = msgspec.Raw(b'"%s"' % mm_hash.encode())
    return part, MediaItem(mm_hash=mm_hash, part=part)


def _url(raw: msgspec.Raw | None, where: str) -> Bytes:
    if raw is not None and _opens(raw, b"{"):
        raw = _fields(raw, where).get("url")
        where = f"{where}.url"
    if raw is None:
        raise RequestError(
            f"{where} is missing: give a data URL, data:image/png;base64,<data>",
            status=400,
            code="invalid_part",
        )
    return _text_bytes(raw, where)


def _opens(raw: msgspec.Raw, bracket: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == bracket


def _text_bytes(raw: msgspec.Raw, where: str) -> Bytes:
    """Return a JSON string's UTF-8 bytes; a view where it holds no escapes."""
    view = memoryview(raw)
    if _opens(raw, b'"') and not _ESCAPE.search(view):
        return view[1:-1]
    return _text(raw, where).encode("utf-8")


def _text(raw: msgspec.Raw, where: str) -> str:
    return _decode(_text_decoder, raw, where)


def _fields(raw: msgspec.Raw, where: str) -> dict[str, msgspec.Raw]:
    return _decode(_object, raw, where)


def _array(raw: msgspec.Raw, where: str) -> list[msgspec.Raw]:
    return _decode(_raws, raw, where)


def _decode(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, where: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{where}: {error}", status=400, code="invalid_field") from error
