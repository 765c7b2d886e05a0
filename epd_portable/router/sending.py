"""The request to a PD instance, and its answer up to the point where it can be passed on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import httpx
import msgspec

from epd_portable.errors import PeerLostError, RequestError
from epd_portable.log import trace
from epd_portable.router.metrics import Metrics
from epd_portable.router.pool import Instance, describe
from epd_portable.router.replies import Reply, error_event
from epd_portable.router.requests import Call
from epd_portable.wire.params import PrefillOutcome

logger = logging.getLogger(__name__)

_ERROR_EVENT = b'data: {"error"'
_PASSED_ON = ("content-type", "retry-after")


class _Outcome(msgspec.Struct):
    """What is read of a complete answer."""

    ec_transfer_params: PrefillOutcome | None = None


class _EngineError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EngineError


class RequestSender:
    """Sends requests to PD instances."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @contextlib.asynccontextmanager
    async def send(
        self, call: Call, pd: Instance, body: bytes, headers: dict[str, str]
    ) -> AsyncIterator[Reply]:
        """Yield a PD instance's answer once its first piece is there.

        Leaving the context before the end of the answer closes the connection, on which the
        instance aborts the request.

        Args:
            call: The request.
            pd: Where to.
            body: As the instance shall see it.
            headers: As the instance shall see them.

        Raises:
            PeerLostError: The instance cannot be reached, or is lost before the first piece.
            RequestError: 504; it stays silent.
        """
        trace(
            "pd_request",
            request_id=headers["x-request-id"],
            instance=pd.name,
            nbytes=len(body),
        )
        request = pd.client.build_request("POST", call.path, content=body, headers=headers)
        with _translated(pd):
            response = await pd.client.send(request, stream=True)
        try:
            yield await self._begin(call, pd, response)
        finally:
            await response.aclose()

    async def _begin(self, call: Call, pd: Instance, response: httpx.Response) -> Reply:
        """Return a reply whose first piece has arrived."""
        headers = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
        if not (call.stream and response.is_success):
            with _translated(pd):
                body = await response.aread()
            self._count_sources(body)
            return Reply(status=response.status_code, headers=headers, body=body)
        pieces = response.aiter_raw()
        first = b""
        with _translated(pd):
            async for piece in pieces:
                first += piece
                # An error that comes first can still become the status of the answer.
                if not first.startswith(_ERROR_EVENT[: len(first)]) or b"\n\n" in first:
                    break
        if first.startswith(_ERROR_EVENT):
            return _failed_stream(first)
        rest = _relay(pd, pieces)
        return Reply(status=response.status_code, headers=headers, body=first, rest=rest)

    def _count_sources(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            outcome = msgspec.json.decode(body, type=_Outcome).ec_transfer_params
            for item in outcome.items if outcome is not None else ():
                self._metrics.sources.labels(item.source, item.path).inc()


async def _relay(pd: Instance, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    except httpx.RequestError as error:
        pd.suspect()
        logger.warning("instance %s lost within an answer: %s", pd.name, describe(error))
        yield error_event(
            f"instance {pd.name} was lost within this answer ({describe(error)}): it is "
            "incomplete; send the request again",
            status=502,
            code="instance_lost",
        )


def _failed_stream(first: bytes) -> Reply:
    """Return the answer to a streamed request that failed before its first token."""
    event = first.partition(b"\n\n")[0].removeprefix(b"data: ")
    try:
        status = msgspec.json.decode(event, type=_ErrorEvent).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = 500
    if not 400 <= status <= 599:
        status = 500
    return Reply(status=status, headers={"content-type": "application/json"}, body=event)


@contextlib.contextmanager
def _translated(pd: Instance) -> Iterator[None]:
    """Turn errors of the HTTP client into the package's own."""
    try:
        yield
    except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        pd.suspect()
        raise PeerLostError(f"instance {pd.name} does not accept connections") from error
    except httpx.TimeoutException as error:
        pd.suspect()
        raise RequestError(
            f"instance {pd.name} was silent for longer than router.idle_timeout_s: the "
            "request is given up; ask for fewer tokens or raise that limit",
            status=504,
            code="timeout",
        ) from error
    except httpx.RequestError as error:
        pd.mark_down(describe(error))
        raise PeerLostError(f"instance {pd.name} was lost: {describe(error)}") from error
