"""What is done when a request or an item of it meets a failure: one table, and what it needs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from epd_portable.errors import EPDError, RequestError
from epd_portable.placement.instances import Instance
from epd_portable.placement.replies import Reply, unavailable
from epd_portable.wire.outcomes import FailureKind, Fallback

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""
JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long when nothing waits for them any more."""
MAX_PREFILLS = 2
"""Prefill instances asked for one request, before the decode instance prefills itself."""
RETRIES_AT_ONCE = 100
REQUESTS_PER_RETRY = 5
"""Requests and jobs may be sent again that often: some at once, and then a part of what comes, so
that a failing topology does not get twice the work."""


class RequestPhase(enum.StrEnum):
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
    (RequestPhase.ENCODE, FailureKind.UNAVAILABLE): ("retried", "local"),
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


ChooseInstance: TypeAlias = Callable[[Collection[str]], Instance | None]
"""Returns the usable instance that should have a request; not one of those names."""
_CONNECTION_LOST = (FailureKind.LOST, FailureKind.UNREACHABLE)


class RequestTries:
    """Where one request has failed, and what is possible next.

    Args:
        metadata_only: Whether it goes with encoders' metadata in place of its media.
        local_encode: Whether PD instances hold the encoder.
        partial_results: Whether it may be answered without some of its items.

    Attributes:
        asked: The instance that was chosen last to answer.
        metadata_only: See above; until that fails.
        prefills: Prefill instances that failed it.
        prefills_here: No prefill instance is asked any more.
    """

    def __init__(
        self,
        retries: RetryBudget,
        *,
        metadata_only: bool = False,
        local_encode: bool = True,
        partial_results: bool = False,
    ) -> None:
        self.asked = ""
        self.metadata_only = metadata_only
        self.prefills: list[str] = []
        self.prefills_here = False
        self._retries = retries
        self._local_encode = local_encode
        self._partial_results = partial_results
        self._failed: list[str] = []
        self._lost_last = False

    def choose_pd(self, choose: ChooseInstance) -> Instance | None:
        """Return who answers; with no other instance, one that broke its connection once more."""
        pd = choose(self._failed)
        if pd is None and self._lost_last:
            pd = choose(())
        if pd is not None:
            self.asked = pd.name
        return pd

    def possible(
        self, failed: RequestFailure, choose_pd: ChooseInstance, choose_prefill: ChooseInstance
    ) -> tuple[Fallback, ...]:
        """Return the fallbacks that depend on more than why and when it failed."""
        found: list[Fallback] = []
        if self.metadata_only and self._local_encode:
            found.append("original_media")
        elif failed.items and self._partial_results:
            found.append("left_out")
        if self._may_retry(failed, choose_pd, choose_prefill) and self._retries.spend():
            found.append("retried")
        return tuple(found)

    def _may_retry(
        self, failed: RequestFailure, choose_pd: ChooseInstance, choose_prefill: ChooseInstance
    ) -> bool:
        if failed.phase is RequestPhase.PREFILL:
            return len(self.prefills) < MAX_PREFILLS and choose_prefill(self.prefills) is not None
        tried = [*self._failed, self.asked]
        if failed.phase is not RequestPhase.ANSWER or len(tried) >= MAX_PD_ATTEMPTS:
            return False
        if failed.kind is FailureKind.ERROR:
            # An instance's own error says more than that there is no other instance.
            return choose_pd(tried) is not None
        return failed.kind in _CONNECTION_LOST

    def go_on(self, failed: RequestFailure, fallback: Fallback) -> bool:
        """Note what is done about a failure; return whether the request is sent again."""
        if failed.phase is RequestPhase.PREFILL:
            self.prefills_here = fallback == "local"
        elif fallback == "retried":
            self._failed.append(self.asked)
            self._lost_last = failed.kind in _CONNECTION_LOST
        elif fallback == "original_media":
            self.metadata_only = False
        else:
            return fallback == "left_out"
        return True


def final_error(failed: RequestFailure, fallback: Fallback) -> RequestError:
    """Return what a client is told of a failure about which nothing more can be done."""
    if fallback == "incomplete":
        message = f"{failed}: the answer is incomplete; send the request again"
        return RequestError(message, status=502, code="instance_lost")
    if fallback == "timeout":
        message = f"{failed}: the request is given up; ask for fewer tokens or raise that limit"
        return RequestError(message, status=504, code="timeout")
    if fallback == "refused" and failed.kind is FailureKind.TOO_LARGE:
        return RequestError(str(failed), status=413, code="item_too_large")
    if fallback == "refused":
        return RequestError(str(failed), status=400, code="item_refused")
    if failed.kind is FailureKind.MISSING:
        return unavailable(str(failed))
    return unavailable(f"{failed}; try again later")
