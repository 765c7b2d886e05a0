"""Calls of all engines behind the front: their order, where engines need one another."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from epd_portable.front.exchange import GracefulHTTPError

Call = tuple[bool | None, str, tuple[Any, ...]]
"""Call of all engines, of those that only encode, or of the others: its name, and arguments."""


def calls_of_all(method: str, *args: Any) -> list[Call]:
    """Return the calls, one after the other, by which all engines do what one engine would.

    - Encode engines pause last: requests that a pause lets end may wait for their items. They go on
      first.
    - Encode engines never drop jobs: those that are open are of requests that came since.
    - Encode engines load no LoRA adapters: they have the encoder alone. Where adapters change it,
      jobs bring their names.
    - Encoder caches are reset once more where items arrive, when they are reset where items come
      from: what an engine sent before its reset is an entry of none after that.
    """
    encoders, others = True, False
    if method == "pause_scheduler" and len(args) == 2:
        mode, clear = args
        return [
            (others, method, (mode, False)),
            (encoders, method, ("wait", clear)),
            # Jobs for other engines have gone on until here.
            (others, method, ("keep", clear)),
        ]
    if method == "sleep" and len(args) == 2:
        level, mode = args
        return [
            (others, "pause_scheduler", (mode, False)),
            (encoders, method, (level, "wait")),
            (others, method, (level, "keep")),
        ]
    if method in ("resume_scheduler", "wake_up"):
        return [(encoders, method, args), (others, method, args)]
    if method in ("add_lora", "remove_lora", "pin_lora", "list_loras"):
        return [(others, method, args)]
    if method in ("reset_encoder_cache", "release_kv_cache_memory"):
        return [(None, method, args), (others, "reset_encoder_cache", ())]
    return [(None, method, args)]


class WeightChanges:
    """Calls after which engines may have other weights.

    Attributes:
        are_new: Engines are to be compared again, see `epd_portable.placement.output_check`.
    """

    def __init__(self) -> None:
        self.are_new = False
        self._paused = False

    def note(self, method: str) -> bool:
        """Note a call that has ended; return whether to compare engines now.

        A paused engine computes nothing, so engines that have paused are compared when they go on.
        """
        self.are_new |= method in ("collective_rpc", "wake_up")
        self._paused = (
            self._paused or method == "pause_scheduler"
        ) and method != "resume_scheduler"
        if compares := self.are_new and not self._paused:
            self.are_new = False
        return compares


_FORGETS = (
    *("reset_encoder_cache", "reset_prefix_cache", "pause_scheduler", "sleep"),
    "release_kv_cache_memory",
)
_CHANGES_WEIGHTS = ("collective_rpc",)


def call_elsewhere(method: str, *args: Any) -> bool:
    """Return whether an engine that other fronts use too must forget what it has computed.

    After these calls weights may be others. The engine continues with its work after any call: a
    pause ends the requests from which its jobs come.

    Raises:
        GracefulHTTPError: The call may change weights, which it does not do at such an engine.
    """
    if method in _CHANGES_WEIGHTS:
        raise GracefulHTTPError(
            f"{method} does not reach engines on other machines: let them leave first, and change "
            "their weights where they run",
            HTTPStatus.CONFLICT,
        )
    return method in _FORGETS and not (method == "pause_scheduler" and args[1:] == (False,))
