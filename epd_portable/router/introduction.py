"""The first requests of an instance, and the first item of every pair, before clients' requests.

The first step of an engine compiles and allocates; the first item of a pair connects the two and
opens the path between them. No client pays for either.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from epd_portable.config.secret import Secret
from epd_portable.log import trace
from epd_portable.router.control import ControlChannels
from epd_portable.router.delivery import EncodeFailure, read_answer
from epd_portable.router.pool import Instance, Pool, describe
from epd_portable.router.requests import CHAT_PATH, Call, read_chat
from epd_portable.router.samples import clip, picture
from epd_portable.router.settings import RouterSettings
from epd_portable.router.transfers import expected_transfer, new_transfer
from epd_portable.wire.params import (
    EncodedItem,
    EncodeTransfer,
    ItemOutcome,
    PrefillOutcome,
    PrefillParams,
)

logger = logging.getLogger(__name__)

FIRST_STEP_TIMEOUT_S = 300.0
MEETINGS = 2
"""Items that a pair is tried with: the first steps of an engine may outlast every deadline."""
_TEXT = {"type": "text", "text": "What is this?"}


class _Answer(msgspec.Struct):
    ec_transfer_params: PrefillOutcome | None = None


class _Refused(Exception):
    """An instance did not answer as it should; says which and how.

    Attributes:
        by_engine: The engine itself would not have the request (400).
    """

    def __init__(self, message: str, *, by_engine: bool = False) -> None:
        super().__init__(message)
        self.by_engine = by_engine


MakeItem = Callable[[], dict[str, Any]]


class Introducer:
    """Lets a newcomer meet those that are there, by requests like those of clients.

    They show a picture or, to a model that takes none, a clip of sound.

    Args:
        settings: Of the router.
        pool: Who is there.
        control: Told of items that nobody will ask for.
        secret: Vouches for transfers.
    """

    def __init__(
        self, settings: RouterSettings, pool: Pool, control: ControlChannels, secret: Secret
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._control = control
        self._secret = secret
        self._meeting = asyncio.Lock()
        self._taken: MakeItem = picture

    async def introduce(self, newcomer: Instance) -> None:
        """Send an instance its first requests, and an item over each of its pairs.

        Of two newcomers the second meets the first, so every pair has met when the instance is let
        in. What goes wrong is logged and noted in `Instance.problem`: an instance may refuse a
        small picture and still be well.
        """
        newcomer.problem = ""
        logger.info("warming up %s", newcomer.name)
        try:
            item = await self._first_requests(newcomer)
            async with self._meeting:
                await self._meet_all(newcomer, item)
        except _Refused as error:
            newcomer.problem = str(error)
            logger.warning("warm-up: %s", error)

    async def _first_requests(self, instance: Instance) -> MakeItem:
        """Return what kind of item the instance takes."""
        if instance.role != "encode" and not self._settings.local_encode:
            await self._ask(instance, self._body([_TEXT], max_tokens=2, logprobs=True))
            return self._taken
        try:
            await self._show(instance, picture)
        except _Refused as error:
            if not error.by_engine:
                raise
            try:
                await self._show(instance, clip)
            except _Refused:
                raise error from None
            self._taken = clip
        return self._taken

    async def _show(self, instance: Instance, make: MakeItem) -> None:
        if instance.role == "encode":
            await self._ask(instance, self._body([make()], max_tokens=1))
            return
        for content in ([_TEXT], [make(), _TEXT]):
            # The kernel of log-probabilities is compiled when they are first asked for.
            await self._ask(instance, self._body(content, max_tokens=2, logprobs=True))

    async def _meet_all(self, newcomer: Instance, make: MakeItem) -> None:
        partners = [
            other for other in self._pool.instances if other.role != newcomer.role and other.usable
        ]
        results = await asyncio.gather(
            *(self._meet(newcomer, partner, make) for partner in partners), return_exceptions=True
        )
        newcomer.introduced()
        for unexpected in results:
            if unexpected is not None and not isinstance(unexpected, _Refused):
                raise unexpected
        if any(result is not None for result in results):
            raise _Refused("; ".join(str(refused) for refused in results if refused is not None))

    async def _meet(self, one: Instance, other: Instance, make: MakeItem) -> None:
        encoder, pd = (one, other) if one.role == "encode" else (other, one)
        for _ in range(MEETINGS):
            body = self._body([make(), _TEXT], max_tokens=1)
            call = read_chat(body, model=self._settings.model, max_items=1)
            item = await self._send_item(call, encoder, pd)
            if item is not None and (item.source, item.encoder) == ("transfer", encoder.name):
                trace("pair.met", encoder=encoder.name, instance=pd.name, path=item.path)
                logger.info("%s and %s have met, by %r", encoder.name, pd.name, item.path)
                return
        how = "did not say how" if item is None else f"had it by {item.source}"
        raise _Refused(
            f"the first item from {encoder.name} to {pd.name} was not transferred, nor the "
            f"second: {pd.name} {how}; the logs of both say why"
        )

    async def _send_item(self, call: Call, encoder: Instance, pd: Instance) -> ItemOutcome | None:
        """Have a call's only item encoded there and used here."""
        (item,) = call.items
        transfer = new_transfer(item, pd, self._secret)
        try:
            return await self._transfer(call, encoder, pd, transfer)
        except BaseException:
            self._control.not_wanted(pd.name, [transfer.transfer_id])
            raise

    async def _transfer(
        self, call: Call, encoder: Instance, pd: Instance, transfer: EncodeTransfer
    ) -> ItemOutcome | None:
        (item,) = call.items
        job = call.for_encoder(item, transfer)
        told = None if self._settings.local_encode else await self._described(encoder, job)
        expected = expected_transfer(item, transfer.transfer_id, encoder, told)
        request = call.for_pd(
            PrefillParams(transfers=(expected,)), {item.mm_hash: told} if told else None
        )
        if told is None:
            _, answer = await asyncio.gather(self._ask(encoder, job), self._ask(pd, request))
        else:
            answer = await self._ask(pd, request)
        try:
            outcome = msgspec.json.decode(answer, type=_Answer).ec_transfer_params
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Refused(f"{pd.name} answered its first item with no answer: {error}") from error
        return (
            next((i for i in outcome.items if i.mm_hash == expected.mm_hash), None)
            if outcome
            else None
        )

    async def _described(self, encoder: Instance, job: bytes) -> EncodedItem:
        """Have an item encoded for an instance that takes no media; return what it is."""
        item = read_answer(await self._ask(encoder, job))
        if isinstance(item, EncodeFailure):
            raise _Refused(f"{encoder.name}: {item.reason}")
        if not item.metadata:
            raise _Refused(f"{encoder.name} knows no metadata of its first item")
        return item

    async def _ask(self, instance: Instance, body: bytes) -> bytes:
        headers = {
            "content-type": "application/json",
            "x-request-id": f"warm-up-{uuid.uuid4().hex}",
        }
        try:
            with instance.held():
                answer = await instance.client.post(
                    CHAT_PATH, content=body, headers=headers, timeout=FIRST_STEP_TIMEOUT_S
                )
        except httpx.TimeoutException as error:
            instance.suspect()
            raise _Refused(
                f"{instance.name} did not answer a first request within {FIRST_STEP_TIMEOUT_S:g} s"
            ) from error
        except httpx.RequestError as error:
            instance.mark_down(describe(error))
            raise _Refused(f"{instance.name}: first request: {describe(error)}") from error
        if not answer.is_success:
            raise _Refused(
                f"{instance.name} answered a first request {answer.status_code}: "
                f"{answer.text[:500]!r}",
                by_engine=answer.status_code == httpx.codes.BAD_REQUEST,
            )
        return answer.content

    def _body(self, content: list[dict[str, Any]], **fields: Any) -> bytes:
        messages = [{"role": "user", "content": content}]
        return msgspec.json.encode({"model": self._settings.model, "messages": messages, **fields})
