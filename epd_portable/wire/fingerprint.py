"""The compatibility fingerprint: settings that two engines must agree on, as named digests.

On the wire it is one text, ``config=1f0c… dtype=bfloat16 model=…``. An older release sends one
digest without names.
"""

from __future__ import annotations

from collections.abc import Mapping

PARTS: Mapping[str, str] = {
    "model": "the served model name (--served-model-name)",
    "revision": "the revision (--revision)",
    "config": "the configuration files of the checkpoint (config.json, params.json)",
    "overrides": "the overrides of the configuration (--hf-overrides, --config-format)",
    "code": "the remote code of the checkpoint (*.py, --trust-remote-code, --code-revision)",
    "processor": "the processor files of the checkpoint (preprocessor_config.json and others)",
    "processor_kwargs": "the processor settings (--mm-processor-kwargs, --media-io-kwargs)",
    "dtype": "the dtype (--dtype)",
}
"""Description of each part, for messages."""

MAX_SHOWN = 40
"""Longest value of a part that is no digest, in characters."""
_SHOWN = ("dtype", "revision")
"""Parts whose values are readable and hold no path and no secret."""


def join(parts: Mapping[str, str]) -> str:
    """Return the text of some parts; values hold neither spaces nor ``=``."""
    return " ".join(f"{name}={value}" for name, value in sorted(parts.items()))


def differences(receiver: str, sender: str) -> str:
    """Return the parts in which a receiver and a sender differ, for people; empty if in none."""
    if receiver == sender:
        return ""
    wanted, given = _split(receiver), _split(sender)
    if not wanted or not given:
        return "the fingerprint: one of the two runs another release of epd-portable"
    names = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
    return ", ".join(_difference(name, wanted, given) for name in sorted(names))


def _difference(name: str, wanted: Mapping[str, str], given: Mapping[str, str]) -> str:
    described = PARTS.get(name, name)
    if name not in _SHOWN:
        return described
    sent, received = given.get(name) or "none", wanted.get(name) or "none"
    return f"{described}: {sent} at the sender, {received} at the receiver"


def _split(text: str) -> dict[str, str]:
    pairs = (each.partition("=") for each in text.split())
    return {name: value for name, separator, value in pairs if separator}
