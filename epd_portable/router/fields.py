"""Names that a request body may hold.

Engines ignore what they do not know, so a misspelt ``max_token`` would be answered as if it had
not been sent. The router refuses it instead, and names the field that was probably meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

from epd_portable.errors import RequestError

STRIPPED = frozenset({"ec_transfer_params", "kv_transfer_params"})
"""Names that travel between the router and its instances; what a client puts there is dropped."""


MAX_NAMED = 10
"""Unknown fields that one answer names."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHARED = _names(
    """
    add_special_tokens allowed_token_ids bad_words cache_salt echo frequency_penalty ignore_eos
    include_stop_str_in_output length_penalty logit_bias logprob_token_ids logprobs max_tokens
    min_p min_tokens mm_payload model n presence_penalty priority prompt_logprobs
    repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
    seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
    stream_interval stream_options structured_outputs temperature thinking_token_budget top_k top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    """
)

CHAT_ENGINE = _SHARED | _names(
    """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
    include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
    parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
    """
)
CHAT_WITHOUT_EFFECT = _names(
    """
    metadata prompt_cache_key prompt_cache_retention safety_identifier service_tier store verbosity
    """
)
"""Fields of OpenAI's own service that change nothing of an answer here."""

CHAT = CHAT_ENGINE | CHAT_WITHOUT_EFFECT
"""Fields of ``/v1/chat/completions``."""

COMPLETION = _SHARED | _names("prompt prompt_embeds suffix")
"""Fields of ``/v1/completions``."""


def check_names(names: Iterable[str], known: frozenset[str]) -> None:
    """Refuse a name that is neither known nor stripped.

    Raises:
        RequestError: 400; names every unknown field, the nearest known name and the remedy.
    """
    unknown = sorted(name for name in names if name not in known and name not in STRIPPED)
    if not unknown:
        return
    described = []
    for name in unknown[:MAX_NAMED]:
        near = difflib.get_close_matches(name[:64], known, n=1)
        described.append(f"{name[:64]!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if len(unknown) > MAX_NAMED:
        described.append(f"and {len(unknown) - MAX_NAMED} more")
    raise RequestError(
        f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(described)} in the request "
        "body: correct the name or remove it",
        status=400,
        code="unknown_field",
    )


def check_extra_arguments(raw: msgspec.Raw | None) -> None:
    """Refuse ``vllm_xargs`` that would pose as the router's own parameters inside the engine.

    Raises:
        RequestError: 400.
    """
    if raw is None or bytes(raw) == b"null":
        return
    try:
        names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"vllm_xargs: expected an object of strings and numbers: {error}",
            status=400,
            code="invalid_field",
        ) from error
    forged = sorted(STRIPPED & names)
    if forged:
        raise RequestError(
            f"vllm_xargs may not hold {forged}: these names are the router's own; remove them",
            status=400,
            code="invalid_field",
        )
