"""The priority that a request asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from epd_portable.router.contents.body import Call
from epd_portable.router.contents.cut_text import decode_if_valid

PRIORITY_HEADER = "x-vllm-priority"
"""A request's priority in place of its field ``priority``, as at vLLM."""


def priority_of(call: Call, headers: Mapping[str, str]) -> int:
    """Return a request's priority as vLLM reads it: by the header, else by the field, else 0."""
    with contextlib.suppress(ValueError):
        return int(headers.get(PRIORITY_HEADER, "none"))
    given = call.fields.get("priority")
    # The instance returns the error for an invalid one.
    return (isinstance(given, msgspec.Raw) and decode_if_valid(given, int)) or 0
