"""Request bodies: read without decoding media, checked, and written for the instances. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd_portable.errors import RequestError
from epd_portable.router import fields
from epd_portable.router.media import MediaItem, read_conversation
from epd_portable.wire.params import EncodeParams, EncodeTransfer, PrefillParams

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

_ENCODER_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what the encoder computes."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, ready to be sent.

    Attributes:
        path: Of the endpoint, at the router and at the instance.
        model: Served name of the model.
        original: The client's bytes, if they may be sent as they are.
        body: Top-level fields, rewritten.
        items: Distinct images.
        stream: Whether the answer comes in pieces.
    """

    path: str
    model: str
    original: bytes | None
    body: Mapping[str, object]
    items: tuple[MediaItem, ...] = ()
    stream: bool = False

    def for_pd(self, params: PrefillParams | None) -> bytes:
        """Return the body for a prefill+decode instance; ``None`` if it expects no transfer."""
        if params is not None:
            return msgspec.json.encode({**self.body, "ec_transfer_params": params})
        return msgspec.json.encode(self.body) if self.original is None else self.original

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


def read_chat(data: bytes, *, model: str, max_items: int) -> Call:
    """Read the body of a chat request.

    Args:
        data: As the client sent it.
        model: Served name of the model.
        max_items: Most images allowed.

    Raises:
        RequestError: 4xx; names the place, the value and the remedy.
    """
    body, untouched = _read_object(data, fields.CHAT, model)
    if "messages" not in body:
        raise _missing("messages", 'a list of messages, [{"role": "user", "content": "..."}]')
    salt = b"".join(bytes(body.get(name, b"")) + b"\0" for name in _ENCODER_SETTINGS)
    conversation = read_conversation(body["messages"], salt=salt, max_items=max_items)
    return Call(
        path=CHAT_PATH,
        model=model,
        original=data if untouched and not conversation.changed else None,
        body={**body, "messages": conversation.messages},
        items=conversation.items,
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
