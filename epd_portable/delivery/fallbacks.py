"""What is done when a request or an item of it meets a failure: one table."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

from epd_portable.delivery.replies import Reply
from epd_portable.errors import EPDError
from epd_portable.wire.outcomes import FailureKind, Fallback

RETRIES_AT_ONCE = 100
REQUESTS_PER_RETRY = 5
"""Requests and jobs may be sent again that often: some at once, and then a part of what comes, so
that a failing topology does not get twice the work."""


class RequestPhase(str, enum.Enum):
    """How far a request has come."""

    ENCODE = "encode"
    """An item is with an encoder."""
    PREFILL = "prefill"
    """A prefill instance has, or is to have, the request."""
    ANSWER = "answer"
    """The instance that answers has, or is to have, the request."""
    STREAM = "stream"
    """A part of the answer is with the client."""


_TRANSIENT = (
    FailureKind.TIMEOUT,
    FailureKind.LOST,
    FailureKind.UNREACHABLE,
    FailureKind.ERROR,
    FailureKind.MISSING,
)

FALLBACKS: Mapping[tuple[RequestPhase, FailureKind], tuple[Fallback, ...]] = {
    **{(RequestPhase.ENCODE, kind): ("retried", "local") for kind in _TRANSIENT},
    (RequestPhase.ENCODE, FailureKind.FULL): ("retried", "local"),
    (RequestPhase.ENCODE, FailureKind.REFUSED): ("local",),
    (RequestPhase.ENCODE, FailureKind.UNAVAILABLE): ("local",),
    **{(RequestPhase.PREFILL, kind): ("retried", "local") for kind in _TRANSIENT},
    (RequestPhase.PREFILL, FailureKind.UNAVAILABLE): ("local",),
    # An item cannot be had, or cannot be described in place of its media.
    (RequestPhase.ANSWER, FailureKind.MISSING): ("original_media", "left_out", "unavailable"),
    (RequestPhase.ANSWER, FailureKind.REFUSED): ("original_media", "refused"),
    (RequestPhase.ANSWER, FailureKind.TOO_LARGE): ("refused",),
    (RequestPhase.ANSWER, FailureKind.UNAVAILABLE): ("unavailable",),
    (RequestPhase.ANSWER, FailureKind.LOST): ("retried", "unavailable"),
    (RequestPhase.ANSWER, FailureKind.UNREACHABLE): ("retried", "unavailable"),
    (RequestPhase.ANSWER, FailureKind.ERROR): ("retried", "error"),
    (RequestPhase.ANSWER, FailureKind.TIMEOUT): ("timeout",),
    (RequestPhase.STREAM, FailureKind.LOST): ("incomplete",),
    (RequestPhase.STREAM, FailureKind.TIMEOUT): ("incomplete",),
}
"""What is done, by when it failed and why: the first that is possible."""


class RequestFailure(EPDError):
    """A request has failed at an instance, or cannot be sent to one.

    Attributes:
        kind: Why.
        phase: When.
        reply: The instance's own answer, with `FailureKind.ERROR`.
        items: ``item_uuid`` of those that cannot be obtained, where it is about some.
    """

    def __init__(
        self,
        kind: FailureKind,
        phase: RequestPhase,
        message: str,
        reply: Reply | None = None,
        *,
        items: Collection[str] = (),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.phase = phase
        self.reply = reply
        self.items = items


def next_fallback(
    phase: RequestPhase, kind: FailureKind, possible: Collection[Fallback] = ()
) -> Fallback:
    """Return what is done next: the first that is possible, else the last."""
    fallbacks = FALLBACKS[phase, kind]
    return next((fallback for fallback in fallbacks if fallback in possible), fallbacks[-1])


class RetryBudget:
    """How often something may be sent again."""

    def __init__(self) -> None:
        self._requests = RETRIES_AT_ONCE * REQUESTS_PER_RETRY

    def count_request(self) -> None:
        """Count a request: for several of them, something may be sent again."""
        self._requests = min(self._requests + 1, RETRIES_AT_ONCE * REQUESTS_PER_RETRY)

    def spend(self) -> bool:
        """Return whether one more may be sent again, and count it."""
        if self._requests < REQUESTS_PER_RETRY:
            return False
        self._requests -= REQUESTS_PER_RETRY
        return True
