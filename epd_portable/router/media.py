"""Images, videos and audio clips in chat messages: found, checked, and keyed by content. Pure.

The engine's caches trust the ``uuid`` of an item, so a client's own is replaced (media) or removed
(everything else): with a forged one, a request could read or overwrite what belongs to another.

Media must come as base64: in data URLs, or as ``input_audio`` has it. Parts that hold embeddings
are refused, and so is a part with two items: the engine would look at one of them only, and not
necessarily at the one that was keyed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from epd_portable.errors import RequestError
from epd_portable.router.data_urls import (
    AUDIO,
    IMAGE,
    VIDEO,
    Bytes,
    MediaKind,
    Modality,
    check_base64,
    split_data_url,
)

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

_ESCAPE = re.compile(rb"\\")
_FORMAT = re.compile(r"[a-z0-9][a-z0-9.+-]{0,31}")

T = TypeVar("T")
Part = dict[str, msgspec.Raw]

_text_decoder = msgspec.json.Decoder(str)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct item of a request.

    Attributes:
        mm_hash: 64 hexadecimal digits that depend on modality and content alone.
        modality: What it is to the model.
        part: The content part as the client sent it, with ``uuid`` set to `mm_hash`.
    """

    mm_hash: str
    modality: Modality
    part: Part


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages ready for an instance.

    Attributes:
        messages: To be sent, as JSON values; what needed no change is the client's own bytes.
        items: Distinct ones in the order of their first place.
        changed: Whether `messages` differs from what the client sent.
    """

    messages: list[object]
    items: tuple[MediaItem, ...]
    changed: bool


def read_conversation(raw: msgspec.Raw, *, salt: bytes = b"", max_items: int) -> Conversation:
    """Find every item, key it, and write the keys into the messages.

    Args:
        raw: The ``messages`` field of a chat request.
        salt: Whatever else the encoder's output depends on; becomes part of every key.
        max_items: Most media parts allowed, repeated ones included.

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
            f"{count} images, videos and audio clips in one request: at most {max_items} are "
            "allowed; send fewer, or raise router.max_media_items",
            status=400,
            code="too_many_items",
        )
    return Conversation(messages=messages, items=tuple(items.values()), changed=changed)


def content_key(modality: Modality, media_type: str, base64_text: Bytes, salt: bytes = b"") -> str:
    """Return 64 hexadecimal digits that name an item by its content."""
    digest = hashlib.sha256()
    for field in (modality.encode(), media_type.encode(), salt, base64_text):
        digest.update(b"%d:" % len(field))
        digest.update(field)
    return digest.hexdigest()


def _read_part(raw: msgspec.Raw, where: str, salt: bytes) -> tuple[object, MediaItem | None]:
    if not _opens(raw, b"{"):
        return raw, None
    part = _fields(raw, where)
    kind = _text(part["type"], f"{where}.type") if "type" in part else None
    refused = sorted(REFUSED_PARTS & ({kind} | part.keys()))
    if refused:
        raise RequestError(
            f"{where}: {refused[0]} is not accepted from clients; send the item itself, for "
            "example as an image_url part with a data URL",
            status=400,
            code="unsupported_part",
        )
    name = _media_field(part, kind, where)
    if name is None:
        if "uuid" not in part:
            return raw, None
        del part["uuid"]
        return part, None
    place = f"{where}.{name}"
    if name == INPUT_AUDIO:
        media_type, data = _read_input_audio(part.get(name), place)
    else:
        url = _url(part.get(name), KINDS[name], place)
        media_type, data = split_data_url(url, KINDS[name], place)
    modality = KINDS[name].modality
    mm_hash = content_key(modality, media_type, data, salt)
    part["uuid"] = msgspec.Raw(b'"%s"' % mm_hash.encode())
    return part, MediaItem(mm_hash=mm_hash, modality=modality, part=part)


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


def _url(raw: msgspec.Raw | None, kind: MediaKind, where: str) -> Bytes:
    if raw is not None and _opens(raw, b"{"):
        raw = _fields(raw, where).get("url")
        where = f"{where}.url"
    if raw is None:
        raise _missing(where, f"a data URL, data:{kind.example};base64,<data>")
    return _text_bytes(raw, where)


def _read_input_audio(raw: msgspec.Raw | None, where: str) -> tuple[str, Bytes]:
    """Return media type and base64 text, as if the clip had come as a data URL."""
    expected = '{"data": "<base64 of the file>", "format": "wav"}'
    if raw is None:
        raise _missing(where, expected)
    fields = _fields(raw, where)
    for name in ("data", "format"):
        if name not in fields:
            raise _missing(f"{where}.{name}", f"the audio clip as {expected}")
    sort = _text(fields["format"], f"{where}.format").lower()
    if not _FORMAT.fullmatch(sort):
        raise RequestError(
            f"{where}.format: {sort[:32]!r} is no audio format; write for example 'wav' or 'mp3'",
            status=400,
            code="invalid_part",
        )
    data = _text_bytes(fields["data"], f"{where}.data")
    check_base64(data, f"{where}.data")
    return f"audio/{sort}", data


def _missing(where: str, expected: str) -> RequestError:
    return RequestError(f"{where} is missing: give {expected}", status=400, code="invalid_part")


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
