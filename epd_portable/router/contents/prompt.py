"""What the prompt of a request is made of, whatever interface it came by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from epd_portable.router.contents.body import Call
from epd_portable.router.contents.cut_text import Bytes

_PROMPTS = ("messages", "input", "prompt")
"""Fields that hold a prompt, by the interface."""
_SALTS = ("tools", "chat_template", "chat_template_kwargs", "system", "instructions")
_raws = msgspec.json.Decoder(list[msgspec.Raw])


def prompt_pieces(call: Call) -> Iterator[Iterable[Bytes]]:
    """Yield what each message of a prompt is made of; of an item, its name."""
    for name in _PROMPTS:
        given = call.fields.get(name)
        if given is None:
            continue
        if isinstance(given, msgspec.Raw):
            is_list = bytes(memoryview(given)[:1]) == b"["
            given = _raws.decode(given) if is_list and name != "prompt" else [given]
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
    given = (call.fields.get(name) for name in _SALTS)
    raws = [bytes(each) if isinstance(each, msgspec.Raw) else b"" for each in given]
    return b"\0".join([call.model.encode(), *map(call.cut.whole, raws)])


def text_field(call: Call, name: str) -> str:
    """Return a field of the body that holds a text; empty if it does not."""
    raw = call.fields.get(name)
    if not isinstance(raw, msgspec.Raw) or bytes(memoryview(raw)[:1]) != b'"':
        return ""
    return call.cut.whole(bytes(raw)).decode("utf-8", "replace")
