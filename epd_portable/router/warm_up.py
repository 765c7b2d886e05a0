"""The first requests of an instance, and the first item of every pair, before clients' requests.

The first step of an engine compiles and allocates; the first item of a pair connects the two and
opens the path between them. No client pays for either, unless a partner stays silent: one that
does delays a newcomer by `PATIENCE_S` at most.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import secrets
import struct
import uuid
import wave
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd_portable.config.roles import ENCODES, SENDS_KV, TAKES_ITEMS, TAKES_KV
from epd_portable.config.secret import Secret
from epd_portable.log import trace
from epd_portable.placement.assignment import EncodeFailure, expected_transfer, new_transfer
from epd_portable.placement.instances import EndpointPool, Instance, WentDownError, while_up
from epd_portable.router.contents.body import CHAT_PATH, Call, Rules, read_call
from epd_portable.router.contents.cut_text import Segments, decode_if_valid
from epd_portable.router.encode_jobs import item_of, read_outcome
from epd_portable.router.fleet.control import ControlChannels, Inbox
from epd_portable.router.http.upstream import Upstream, UpstreamError
from epd_portable.router.prefill import for_prefill, read_kv, with_kv
from epd_portable.router.settings import RouterSettings
from epd_portable.router.stored import LearningLookup
from epd_portable.wire.messages import Nack, NackCode
from epd_portable.wire.outcomes import FailureKind
from epd_portable.wire.params import EncodeTransfer, ItemOutcome, PrefillOutcome, PrefillParams

logger = logging.getLogger(__name__)

FIRST_STEP_TIMEOUT_S = 300.0
PATIENCE_S = 30.0
"""How long a newcomer that has answered its own first requests waits until every pair has met."""
MEETINGS = 2
"""Items that a pair is tried with: the first steps of an engine may outlast every deadline."""
MEETINGS_AT_ONCE = 16
"""Of one newcomer."""
_TEXT = {"type": "text", "text": "What is this?"}


# Small items, each different from all others: no cache knows them.

_SIDE = 112
_SAMPLES = 16_000


def picture() -> dict[str, Any]:
    """Return a square of a random colour, 112 × 112 pixels, as a part of a message."""
    rows = (b"\0" + secrets.token_bytes(3) * _SIDE) * _SIDE
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def clip() -> dict[str, Any]:
    """Return half a second of noise, 16,000 samples a second, as a part of a message."""
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(_SAMPLES)
        opened.writeframes(secrets.token_bytes(_SAMPLES))
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


# Who meets whom.


class _Answer(msgspec.Struct):
    ec_transfer_params: PrefillOutcome | None = None


class _RefusedError(Exception):
    """An instance did not answer as it should: its engine refused, or the connection was lost."""

    def __init__(self, message: str, *, by_engine: bool = False, lost: bool = False) -> None:
        super().__init__(message)
        self.by_engine = by_engine
        self.lost = lost


@dataclass(slots=True)
class WarmUp:
    """Lets a newcomer meet those that are there, by requests like those of clients.

    They show a picture or, to a model that takes none, a clip of sound. ``store`` learns which
    entries encoders write, if there is one.
    """

    settings: RouterSettings
    instances: EndpointPool
    upstream: Upstream
    control: ControlChannels
    secret: Secret
    store: LearningLookup | None
    _make_item: Callable[[], dict[str, Any]] = field(default=picture, init=False)
    _ready: set[Instance] = field(default_factory=set, init=False)

    async def warm_up(self, newcomer: Instance) -> None:
        """Send an instance its first requests, and an item over each of its pairs.

        It gets clients' requests (`Instance.mark_warmed_up`) when its first ones are answered and
        it has met those that answer in time; the other pairs meet afterwards. What goes wrong is
        logged and noted in `Instance.problem`: an instance may refuse a small picture and still be
        well. One that goes down meanwhile, or whose connection breaks over its first requests, is
        not let in.
        """
        with contextlib.suppress(WentDownError), while_up(newcomer.held()):
            newcomer.note("")
            logger.info("warming up %s", newcomer.name)
            try:
                await self._send_first_requests(newcomer)
            except _RefusedError as error:
                _note(newcomer, [str(error)])
                if error.lost:
                    return
            self._ready.add(newcomer)
            try:
                await self._meet_all(newcomer)
            finally:
                self._ready.discard(newcomer)

    async def _send_first_requests(self, instance: Instance) -> None:
        if instance.role != "encode" and not self.settings.local_encode:
            await self._ask(instance, self._body([_TEXT], max_tokens=2, logprobs=True))
            return
        try:
            await self._show(instance, picture())
        except _RefusedError as error:
            if not error.by_engine:
                raise
            try:
                await self._show(instance, clip())
            except _RefusedError:
                raise error from None
            self._make_item = clip

    async def _show(self, instance: Instance, item: dict[str, Any]) -> None:
        if instance.role == "encode":
            await self._ask(instance, self._body([item], max_tokens=1))
            return
        for content in ([_TEXT], [item, _TEXT]):
            # The kernel of log-probabilities is compiled when they are first asked for.
            await self._ask(instance, self._body(content, max_tokens=2, logprobs=True))

    async def _meet_all(self, newcomer: Instance) -> None:
        """Meet all instances that have answered their own first requests, and be let in.

        Of two newcomers the second meets the first, so every pair meets.
        """
        some = asyncio.Semaphore(MEETINGS_AT_ONCE)
        partners = () if newcomer.problem else self.instances.all
        waiting = {
            asyncio.create_task(self._meet(*pair, some)): other.name
            for other in partners
            if other.usable or other in self._ready
            for pair in _pairs(newcomer, other)
        }
        try:
            late: set[asyncio.Task[str]] = set()
            if waiting:
                _, late = await asyncio.wait(waiting, timeout=PATIENCE_S)
            if late:
                names = ", ".join(sorted(waiting[task] for task in late))
                logger.warning("%s gets requests, and has not met %s yet", newcomer.name, names)
                newcomer.note(f"has not met {names} yet")
            newcomer.mark_warmed_up()
            if waiting:
                await asyncio.wait(waiting)
                _note(newcomer, (task.result() for task in waiting))
        finally:
            for task in waiting:
                task.cancel()

    async def _meet(self, first: Instance, second: Instance, some: asyncio.Semaphore) -> str:
        """Have a pair meet; return what went wrong."""
        async with some:
            try:
                if second.role in TAKES_ITEMS:
                    await self._transfer_item(first, second)
                else:
                    await self._transfer_kv(first, second)
            except _RefusedError as error:
                return str(error)
        logger.info("%s and %s have met", first.name, second.name)
        return ""

    async def _transfer_item(self, encoder: Instance, pd: Instance) -> None:
        """Have an item encoded by one instance and used by the other."""
        outcome = None
        for _ in range(MEETINGS):
            body = self._body([self._make_item(), _TEXT], max_tokens=1)
            call = read_call(CHAT_PATH, body, Rules(max_items=1))
            transfer = new_transfer(call.items[0], pd.control, self.secret)
            try:
                with self.control.expect([transfer.transfer_id]) as inbox:
                    outcome = await self._send_item(call, transfer, encoder, pd, inbox)
            except BaseException:
                self.control.not_wanted(pd.name, [transfer.transfer_id])
                raise
            if outcome and (outcome.source, outcome.encoder) == ("transfer", encoder.name):
                trace("pair.met", encoder=encoder.name, instance=pd.name, path=outcome.path)
                return
        how = f"had it by {outcome.source}" if outcome else "did not say how"
        raise _RefusedError(
            f"the first item from {encoder.name} to {pd.name} was not transferred, nor the "
            f"second: {pd.name} {how}; the logs of both say why"
        )

    async def _send_item(
        self,
        call: Call,
        transfer: EncodeTransfer,
        encoder: Instance,
        pd: Instance,
        inbox: Inbox,
    ) -> ItemOutcome | None:
        """Send encode job and request; return how the PD instance had the call's only item."""
        (item,) = call.items
        # What it announces waits for the request.
        encoded = await self._ask(encoder, call.for_encoder(item, transfer))
        metadata = None
        if not self.settings.local_encode:
            described = item_of(read_outcome(encoded))
            if isinstance(described, EncodeFailure) or not described.metadata:
                raise _RefusedError(f"{encoder.name} knows no metadata of its first item")
            metadata = described
        expected = expected_transfer(transfer, encoder.name, metadata)
        request = call.for_pd(
            PrefillParams(transfers=(expected,), reply_to=self.control.identity),
            {item.item_uuid: metadata} if metadata else None,
        )
        asked = asyncio.ensure_future(self._ask(pd, request))
        refused = asyncio.ensure_future(self._refused(transfer, pd, inbox))
        try:
            await asyncio.wait((asked, refused), return_when=asyncio.FIRST_COMPLETED)
            if refused.done() and not asked.done():
                detail = refused.result().detail
                raise _RefusedError(f"{pd.name} refuses the items of {encoder.name}: {detail}")
            answer = decode_if_valid(await asked, _Answer)
        finally:
            asked.cancel()
            refused.cancel()
        if answer is None:
            raise _RefusedError(
                f"{pd.name} answered its first item with no answer that can be read"
            )
        items = answer.ec_transfer_params.items if answer.ec_transfer_params else ()
        return next((each for each in items if each.mm_hash == expected.item_uuid), None)

    async def _refused(self, transfer: EncodeTransfer, pd: Instance, inbox: Inbox) -> Nack:
        """Return when the two instances do not fit; the PD instance does without other items."""
        while True:
            nack = await inbox.encoder_refused(transfer.transfer_id)
            if nack.code is NackCode.INCOMPATIBLE:
                return nack
            self.control.encode_failed(pd.name, transfer.transfer_id, nack.detail)

    async def _transfer_kv(self, prefill: Instance, decode: Instance) -> None:
        """Have a text computed by one instance and answered by the other."""
        text = {"type": "text", "text": f"What is {uuid.uuid4().hex}?"}
        call = read_call(CHAT_PATH, self._body([text], max_tokens=2), Rules())
        params = read_kv(await self._ask(prefill, for_prefill(call).for_pd(None)))
        if params is None:
            raise _RefusedError(f"{prefill.name} says nothing of the KV of its first prompt")
        await self._ask(decode, with_kv(call, params).for_pd(None))
        trace("kv.met", prefill=prefill.name, instance=decode.name)

    async def _ask(self, instance: Instance, body: Segments | bytes) -> bytes:
        """Return the answer to a request."""
        request_id = f"warm-up-{uuid.uuid4().hex}"
        try:
            with while_up(instance.working()):
                status, _, answer = await self.upstream.fetch(
                    "POST",
                    instance.url + CHAT_PATH,
                    body=body,
                    headers={"content-type": "application/json", "x-request-id": request_id},
                    connect_s=self.settings.connect_timeout_s,
                    timeout_s=FIRST_STEP_TIMEOUT_S,
                )
        except WentDownError as error:
            raise _RefusedError(f"{instance.name} {error}", lost=True) from error
        except UpstreamError as error:
            instance.failed(error.kind)
            is_late = error.kind is FailureKind.TIMEOUT
            problem = f"no answer within {FIRST_STEP_TIMEOUT_S:g} s" if is_late else str(error)
            message = f"{instance.name}: first request: {problem}"
            raise _RefusedError(message, lost=not is_late) from error
        if not 200 <= status < 300:
            raise _RefusedError(
                f"{instance.name} answered a first request {status}: "
                f"{answer[:500].decode('utf-8', 'replace')!r}",
                by_engine=status == 400,
            )
        instance.answered()
        if self.store is not None and instance.role == "encode":
            outcome = read_outcome(answer)
            self.store.note_namespace(instance.name, outcome.namespace if outcome else "")
        return answer

    def _body(self, content: list[dict[str, Any]], **fields: Any) -> bytes:
        messages = [{"role": "user", "content": content}]
        return msgspec.json.encode({"model": self.settings.model, "messages": messages, **fields})


def _pairs(one: Instance, other: Instance) -> Iterator[tuple[Instance, Instance]]:
    """Yield two instances in each order in which they may work on a request."""
    for first, second in ((one, other), (other, one)):
        items = first.role in ENCODES and second.role in TAKES_ITEMS
        if first is not second and (items or (first.role in SENDS_KV and second.role in TAKES_KV)):
            yield first, second


def _note(newcomer: Instance, problems: Iterable[str]) -> None:
    """Log what went wrong, and note it of the newcomer."""
    problem = "; ".join(filter(None, problems))
    newcomer.note(problem)
    if problem:
        logger.warning("warm-up: %s", problem)
