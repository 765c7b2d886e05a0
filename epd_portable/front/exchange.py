"""An HTTP request at the front: its body, its response, and why it is refused.

vLLM's handlers run in the task of the request or in tasks that this one starts, so a context
variable leads from `epd_portable.front.http` to `epd_portable.front.client`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from vllm.v1.engine import EngineCoreRequest

from epd_portable.errors import RequestError
from epd_portable.placement.admission import AdmissionControl, QueuedRequest
from epd_portable.placement.instances import Instance
from epd_portable.responses import RETRY_AFTER_S
from epd_portable.vllm_plugin import compat
from epd_portable.wire.params import OutputSample

if TYPE_CHECKING:
    from epd_portable.front.headers import Hints

GracefulHTTPError: Any = compat.graceful_error()
_CODES = {429: "engines_full", 503: "service_unavailable"}
"""Codes of errors that a later attempt can avoid, by status."""
LEFT_OUT = "x-epd-items-left-out"


@dataclass(slots=True, eq=False)
class FrontExchange:
    """An HTTP request, which may be several requests to engines.

    Attributes:
        nbytes: Bytes of its body so far.
        key: Digest of the client's API key; empty without one.
        status: Status of the response; 0 before it.
        unread: The body has not been requested.
        begun: A part of the response is sent: the status cannot change any more.
        failure: Reason why the request is not served. The middleware sends it as the response.
        first_at: Monotonic time of the first byte of the response's body.
        nbytes_out: Bytes of the response's body.
        engine: Name of the engine that generates.
        prefilled: Engine that has prefilled for the other.
        tokens: Number of generated tokens.
        items: Origin of each item, an `ItemOutcome`, by its name.
        names: Names of the distinct items, in their order.
        encoded: Encoder of each item that is not encoded elsewhere, by the item's name.
        left_out: Names of items that the response does without.
        model: Name that the client requests.
        session: Name of the client's conversation; or empty.
        hints: Engines that a trusted gateway names; ``None`` for clients.
        samples: Samples of its items' encoder outputs, with the engine that took each, by the
            item's name; ``None`` if nothing wants them.
    """

    nbytes: int = 0
    key: bytes = b""
    status: int = 0
    request_id: str = ""
    unread: bool = True
    begun: bool = False
    failure: RequestError | ClientDisconnect | None = None
    first_at: float = 0.0
    nbytes_out: int = 0
    engine: str = ""
    prefilled: Instance | None = None
    tokens: int = 0
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    encoded: dict[str, Instance] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    model: str = ""
    session: str = ""
    hints: Hints | None = None
    samples: dict[str, tuple[str, OutputSample]] | None = None

    def refuse(self, error: RequestError | GracefulHTTPError) -> None:
        """Respond with an error, also to a stream, of which vLLM has sent no part yet."""
        if self.begun or self.failure is not None:
            return
        if isinstance(error, GracefulHTTPError):
            status = int(error.http_status)
            self.failure = RequestError(
                error.message,
                status=status,
                code=_CODES.get(status, "invalid_request"),
                retry_after_s=RETRY_AFTER_S if status in _CODES else None,
            )
        else:
            self.failure = error


exchange: ContextVar[FrontExchange] = ContextVar("epd_exchange")
"""The HTTP request that the present task serves; unset outside of one."""


def current() -> FrontExchange:
    """Return the HTTP request of the present task, or a new one outside of any."""
    return exchange.get(None) or FrontExchange()


def refused(error: RequestError) -> Any:
    """Respond to the present task's request with an error; return the one to raise to vLLM."""
    current().refuse(error)
    return GracefulHTTPError(str(error), HTTPStatus(error.status))


async def admit(admission: AdmissionControl, request: EngineCoreRequest) -> QueuedRequest | None:
    """Return when a request of vLLM's may go on; see `AdmissionControl.enter`.

    Raises:
        GracefulHTTPError: 429.
    """
    here = current()
    try:
        return await admission.enter(
            items=len({each.identifier for each in request.mm_features or ()}),
            nbytes=here.nbytes,
            key=here.key,
            priority=request.priority,
        )
    except RequestError as error:
        raise refused(error) from error
