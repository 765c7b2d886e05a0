"""Prompts that one instance computes for another, which answers them (roles prefill and decode).

A prefill instance is asked for one token, and says in ``kv_transfer_params`` where the KV of the
prompt is; a decode instance that is told so reads it, and computes only the prompt's last token.
Whatever goes wrong, it has the whole request, with its media, and can prefill by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from epd_portable.placement.fallbacks import (
    MAX_PREFILLS,
    RequestFailure,
    RequestPhase,
    RequestTries,
)
from epd_portable.placement.instances import Instance
from epd_portable.placement.replies import Reply
from epd_portable.router.contents.body import (
    CHAT_PATH,
    COMPLETION_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Call,
)
from epd_portable.router.contents.cut_text import decode_if_valid, opens
from epd_portable.router.selector import Selection
from epd_portable.wire.outcomes import FailureKind

logger = logging.getLogger(__name__)

PrefillPlace = Literal["disaggregated", "local_first", "unsuited", "unavailable", "local"]
"""Where the prompt of a request to a decode instance is computed.

``disaggregated``: by a prefill instance. By the decode instance itself: ``local_first``, as a
decider of ``router.choice`` says; ``unsuited``, not one prompt with one answer, or of an endpoint
at which engines say nothing of KV; ``unavailable``, as there is no prefill instance; ``local``, as
those that were asked failed.
"""

ASKED_FOR_KV: Mapping[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a prefill instance is told, in vLLM's words: another one decodes."""

_ONE_TOKEN: Mapping[str, Mapping[str, object]] = {
    **{path: {"max_tokens": 1} for path in (CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH)},
    RESPONSES_PATH: {"max_output_tokens": 1, "store": False, "background": False},
}
"""Endpoints whose prompts may be computed apart, and the fields by which a prefill instance
generates one token, which is not fetched later. At the last two only later versions of vLLM tell of
KV (0.32 does)."""
_LATER = frozenset({RESPONSES_PATH, MESSAGES_PATH})
_OTHER_ANSWERS = (
    *("prompt_logprobs", "echo", "use_beam_search", "prompt_embeds"),
    *("previous_response_id", "conversation", "background"),
)
"""Fields of requests whose answers need more than the KV of a prompt that is all here."""
_OF_ANSWERS = frozenset(
    (
        *("max_completion_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("logprobs", "top_logprobs", "stream_options", "stop_sequences", "include"),
    )
)
"""Fields that say how much is generated and how it is told: a prefill instance generates one token,
which no client sees."""


class _KvParams(msgspec.Struct):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def asks_for_kv(call: Call) -> bool:
    """Return whether a hop wants the KV of a prompt computed, and answers elsewhere."""
    return _given_kv(call).do_remote_decode


def brings_kv(call: Call) -> bool:
    """Return whether a hop says where the KV of a prompt is."""
    return _given_kv(call).do_remote_prefill


def _given_kv(call: Call) -> _KvParams:
    raw = call.fields.get("kv_transfer_params")
    if not isinstance(raw, msgspec.Raw) or not opens(raw, b"{"):
        return _KvParams()
    return decode_if_valid(raw, _KvParams) or _KvParams()


def suits(call: Call) -> bool:
    """Return whether one prefill instance can compute all of a call's prompt."""
    fields = call.fields
    if call.path not in _ONE_TOKEN or bytes(fields.get("n", b"1")) not in (b"1", b"null"):  # type: ignore[call-overload]
        return False
    if any(_is_given(fields.get(name)) for name in _OTHER_ANSWERS):
        return False
    if call.path == RESPONSES_PATH:
        return _calls_no_tools_itself(fields.get("tools"))
    prompt = fields.get("prompt")
    if call.path != COMPLETION_PATH or prompt is None:
        return call.path != COMPLETION_PATH
    assert isinstance(prompt, msgspec.Raw)
    inner = bytes(prompt).lstrip()[1:].lstrip()
    # One text, or the tokens of one.
    return opens(prompt, b'"') or (opens(prompt, b"[") and inner[:1].isdigit())


class _Tool(msgspec.Struct):
    type: str = "function"


def _calls_no_tools_itself(tools: object) -> bool:
    """Return whether the engine leaves tools to the client: else it has several prompts."""
    if not isinstance(tools, msgspec.Raw) or not opens(tools, b"["):
        return True
    read = decode_if_valid(tools, list[_Tool])
    return read is not None and all(tool.type == "function" for tool in read)


def choose_prefill(
    call: Call,
    selection: Selection,
    decode: Instance,
    tries: RequestTries,
    without_kv: Collection[str],
) -> tuple[Instance | None, PrefillPlace]:
    """Return who computes the prompt of a call for a decode instance, and where that is.

    ``without_kv`` are endpoints at which the engines say nothing of KV.
    """
    if not suits(call) or call.path in without_kv:
        return None, "unsuited"
    if tries.prefills_here or len(tries.prefills) >= MAX_PREFILLS:
        return None, "local"
    if not selection.disaggregates_prefill(decode):
        return None, "local_first"
    chosen = selection.choose_prefill(tries.prefills)
    if chosen is None:
        return None, "local" if tries.prefills else "unavailable"
    return chosen, "disaggregated"


def for_prefill(call: Call) -> Call:
    """Return a call for one token, and for what tells where the KV of its prompt is."""
    kept = {name: value for name, value in call.fields.items() if name not in _OF_ANSWERS}
    fields = {**kept, **_ONE_TOKEN[call.path], "stream": False, "kv_transfer_params": ASKED_FOR_KV}
    return msgspec.structs.replace(call, changed=True, stream=False, fields=fields)


def with_kv(call: Call, params: msgspec.Raw) -> Call:
    """Return a call that says where the KV of its prompt is."""
    fields = {**call.fields, "kv_transfer_params": params}
    return msgspec.structs.replace(call, changed=True, fields=fields)


def read_kv(body: bytes) -> msgspec.Raw | None:
    """Return what a prefill instance says of the KV; ``None`` if it says nothing."""
    answer = decode_if_valid(body, _Answer)
    if answer is None or not opens(answer.kv_transfer_params, b"{"):
        return None
    return answer.kv_transfer_params.copy()


def kv_of(reply: Reply, call: Call, prefill: Instance, without_kv: set[str]) -> msgspec.Raw:
    """Return what a prefill instance says of the KV of a call; see `choose_prefill`.

    Raises:
        RequestFailure: It says nothing.
    """
    if (params := read_kv(reply.body)) is not None:
        return params
    message = f"instance {prefill.name} says nothing of the KV of its prompt"
    if call.path in _LATER:
        without_kv.add(call.path)
        logger.warning(
            "%s at %s: prompts of this endpoint are computed where they are answered from now on; "
            "later versions of vLLM say it",
            message,
            call.path,
        )
    raise RequestFailure(FailureKind.ERROR, RequestPhase.ANSWER, message)


def _is_given(value: object) -> bool:
    return value is not None and bytes(value) not in (b"null", b"false")  # type: ignore[call-overload]
