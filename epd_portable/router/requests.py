"""Request bodies: read without decoding media, checked, and written for the instances. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from epd_portable.errors import RequestError
from epd_portable.router import fields
from epd_portable.router.media import MediaItem, read_conversation
from epd_portable.router.substitution import rename_media, replace_media
from epd_portable.wire.params import EncodedItem, EncodeParams, EncodeTransfer, PrefillParams

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

_ENCODER_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what the encoder computes."""

_WITH_SOUND = frozenset({"video", "audio"})
"""Modalities of which an item can be two to the engine, if a video's sound is taken too; those are
encoded where the whole prompt is."""

MAX_COMMAS = 1_000_000
"""In one body. Every value of a list or object takes some 60 bytes while the body is read, even one
of 2 bytes in it; there are no more of them than commas. No model reads a text with as many."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _ProcessorSettings(msgspec.Struct):
    """What is read of ``mm_processor_kwargs``."""

    use_audio_in_video: object = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, ready to be sent.

    Attributes:
        path: Of the endpoint, at the router and at the instance.
        model: Served name of the model.
        original: The client's bytes, if they may be sent as they are.
        body: Top-level fields, rewritten.
        items: Distinct images, videos and audio clips.
        stream: Whether the answer comes in pieces.
    """

    path: str
    model: str
    original: bytes | None
    body: Mapping[str, object]
    items: tuple[MediaItem, ...] = ()
    stream: bool = False

    def for_pd(
        self, params: PrefillParams | None, told: Mapping[str, EncodedItem] | None = None
    ) -> bytes:
        """Return the body for a prefill+decode instance.

        Args:
            params: ``None`` if it expects no transfer.
            told: What encoders said of the items, by the items' names here: goes in place of their
                media.
        """
        body = self.body if told is None else {**self.body, "messages": self._bare(told)}
        if params is not None:
            return msgspec.json.encode({**body, "ec_transfer_params": params})
        return msgspec.json.encode(self.body) if self.original is None else self.original

    def renamed(self) -> Call:
        """Return this call with names for its items that were never sent without media."""
        messages, items = rename_media(cast("list[object]", self.body["messages"]), self.items)
        body = {**self.body, "messages": messages}
        return msgspec.structs.replace(self, body=body, items=items)

    def for_encoder(self, item: MediaItem, transfer: EncodeTransfer) -> bytes:
        """Return the body of the encode job for one item: nothing of the text is in it."""
        settings = {name: self.body[name] for name in _ENCODER_SETTINGS if name in self.body}
        return msgspec.json.encode(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": [item.part]}],
                "max_tokens": 1,
                "temperature": 0,
                "stream": False,
                **settings,
                "ec_transfer_params": EncodeParams(transfers=(transfer,)),
            }
        )

    def _bare(self, told: Mapping[str, EncodedItem]) -> list[object]:
        return replace_media(cast("list[object]", self.body["messages"]), told)


def read_chat(data: bytes, *, model: str, max_items: int) -> Call:
    """Read the body of a chat request.

    Args:
        data: As the client sent it.
        model: Served name of the model.
        max_items: Most images, videos and audio clips allowed.

    Raises:
        RequestError: 4xx; names the place, the value and the remedy.
    """
    body, untouched = _read_object(data, fields.CHAT, model)
    if "messages" not in body:
        raise _missing("messages", 'a list of messages, [{"role": "user", "content": "..."}]')
    salt = b"".join(bytes(body.get(name, b"")) + b"\0" for name in _ENCODER_SETTINGS)
    conversation = read_conversation(body["messages"], salt=salt, max_items=max_items)
    sound_in_video = _uses_sound_of_videos(body.get("mm_processor_kwargs"))
    return Call(
        path=CHAT_PATH,
        model=model,
        original=data if untouched and not conversation.changed else None,
        body={**body, "messages": conversation.messages},
        items=tuple(
            item
            for item in conversation.items
            if not (sound_in_video and item.modality in _WITH_SOUND)
        ),
        stream=_is_true(body.get("stream")),
    )


def read_completion(data: bytes, *, model: str) -> Call:
    """Read the body of a text completion request.

    Raises:
        RequestError: As `read_chat`.
    """
    body, untouched = _read_object(data, fields.COMPLETION, model)
    if not {"prompt", "prompt_embeds"} & body.keys():
        raise _missing("prompt", "the text to complete")
    return Call(
        path=COMPLETION_PATH,
        model=model,
        original=data if untouched else None,
        body=body,
        stream=_is_true(body.get("stream")),
    )


def _read_object(
    data: bytes, known: frozenset[str], model: str
) -> tuple[dict[str, msgspec.Raw], bool]:
    """Return the checked top level and whether nothing was dropped from it."""
    commas = data.count(b",")
    if commas > MAX_COMMAS:
        raise RequestError(
            f"request body of {len(data)} bytes holds {commas} commas: at most {MAX_COMMAS} are "
            "allowed; send fewer values",
            status=413,
            code="too_many_values",
        )
    try:
        body = _object.decode(data)
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
    fields.check_names(body, known)
    fields.check_extra_arguments(body.get("vllm_xargs"))
    asked = body.get("model")
    if asked is not None and bytes(asked) != b"null":
        _check_model(asked, model)
    forged = fields.STRIPPED & body.keys()
    for name in forged:
        del body[name]
    return body, not forged


def _uses_sound_of_videos(settings: msgspec.Raw | None) -> bool:
    if settings is None:
        return False
    try:
        use = msgspec.json.decode(settings, type=_ProcessorSettings | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"mm_processor_kwargs: {error}; give an object of the processor's settings",
            status=400,
            code="invalid_field",
        ) from error
    return use is not None and bool(use.use_audio_in_video)


def _check_model(asked: msgspec.Raw, served: str) -> None:
    try:
        name = msgspec.json.decode(asked, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"model: {error}", status=400, code="invalid_field") from error
    if name != served:
        raise RequestError(
            f"model {name[:128]!r} is not served here: this router serves {served!r}; "
            "correct the field or leave it out",
            status=404,
            code="model_not_found",
        )


def _missing(name: str, expected: str) -> RequestError:
    return RequestError(
        f"field {name!r} is missing in the request body: give {expected}",
        status=400,
        code="missing_field",
    )


def _is_true(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw) == b"true"
