"""A front over played engines, in which a random number selects the next event.

The front is `SplitClient` with `Engines`, whole but for sockets; engines are played: they take what
vLLM's client would send, and put out what vLLM's would. What they do not reproduce: steps, whose
room it is that items wait for, the connector's own deadlines (an engine may give an item up at any
moment).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from epd_portable.config.front import FrontSection
from epd_portable.front.client import SplitClient
from epd_portable.front.exchange import FrontExchange, GracefulHTTPError, exchange
from epd_portable.placement.assignment import EncodeFailure, FailureKind
from epd_portable.transfer.stores.lookup import StoredItem
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire.params import CacheNews, to_params
from tests.integration.front.played_front import (
    CONTROL,
    PAIRS,
    client_of,
    content_of,
    request,
    seen_of,
)

ITEMS = [*"abcdef", *PAIRS]
HELD = 3
ORDERS = get_args(FrontSection.model_fields["encode_order"].annotation)
"""Items that an engine keeps when no request needs them."""
STEPS = 60
MOST_STEPS = 5_000
"""Until everybody is answered when nothing goes wrong any more."""
TOKENS = 3
"""Tokens of a response, each with the number of its request and its images."""


@dataclass(eq=False)
class Asked:
    """A request as its client sees it; a stream has begun with its first token."""

    name: str
    pictures: str
    streams: bool = False
    exchange: FrontExchange = field(default_factory=FrontExchange)
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    given_up: bool = False

    @property
    def answer(self) -> list[int]:
        return [int(self.name), *chain.from_iterable(map(seen_of, self.pictures))] * TOKENS


class Life:
    """A life of an engine, in the place of vLLM's client of it."""

    def __init__(self, name: str, loads: Callable[[str], bool]) -> None:
        self.name = name
        self.loads = loads
        """Predicate: an entry of the store is there when it is loaded."""
        self.requests: dict[str, EngineCoreRequest] = {}
        self.said: dict[str, int] = {}
        self.cached: dict[str, list[int]] = {}
        self.kept: dict[tuple[str, str], list[int]] = {}
        """For requests that have found it, by request and item."""
        self.entries: dict[str, bool] = {}
        self.requested: list[str] = []
        """Requested transfers. The front has received neither these nor `entries` yet."""
        self.on_demand: dict[str, bool] = {}
        """Transfers, and whether it has asked for them."""
        self.brought: dict[str, list[int]] = {}
        self.kv: dict[str, list[int]] = {}
        """Prompts that it has computed for decode engines, by its request."""
        self.outbox: list[EngineCoreOutput] = []
        self.stopped = False
        self.dead = False
        self.says_dead = False
        self.gone = asyncio.Event()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()

    # -- what the front calls ---------------------------------------------------------------------

    async def add_request_async(self, core: EngineCoreRequest) -> None:
        if self.says_dead:
            raise EngineDeadError
        assert core.request_id not in self.requests, "no id comes twice"
        if not self.dead:
            self.requests[core.request_id] = core
            self._find(core)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for each in request_ids:
            self.requests.pop(each, None)
            self.said.pop(each, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        found = await self._outputs.get()
        if isinstance(found, Exception):
            raise found
        return found

    def shutdown(self) -> None:
        self.dead = True

    # -- what happens -----------------------------------------------------------------------------

    def _find(self, core: EngineCoreRequest) -> None:
        """Keep what a request finds here; ask for what nobody was to bring otherwise."""
        for each in transfers_of(core):
            name, transfer_id = each["item_uuid"], each["transfer_id"]
            if each.get("store") and self.loads(name):
                self.brought[transfer_id] = seen_of(name)
            elif each.get("store"):
                self.requested.append(transfer_id)
            if not each.get("on_demand"):
                continue
            if name in self.cached:
                self.kept[core.request_id, name] = self.cached[name]
            else:
                self.requested.append(transfer_id)
            self.on_demand[transfer_id] = name not in self.cached

    def keep(self, name: str, content: list[int]) -> None:
        """Have an item from now on, and perhaps one that is idle no more."""
        self.cached.pop(name, None)
        self.cached[name] = content
        self.entries[name] = True
        while len(self.cached) > HELD:
            self.lose(next(iter(self.cached)))

    def lose(self, name: str) -> None:
        """An item is evicted."""
        del self.cached[name]
        self.entries[name] = False

    def put(
        self,
        request_id: str,
        *tokens: int,
        end: FinishReason | None = None,
        kv: dict[str, Any] | None = None,
    ) -> None:
        """Put something out, which is on its way from then on."""
        output = EngineCoreOutput(request_id, [*tokens], finish_reason=end, kv_transfer_params=kv)
        self.outbox.append(output)
        if end is not None:
            del self.requests[request_id]
            self.said.pop(request_id, None)

    @property
    def has_news(self) -> bool:
        return bool(self.entries or self.requested)

    def arrive(self) -> None:
        """Let all that was put out arrive at the front, in one message."""
        if self.has_news:
            news = to_params(CacheNews(entries=self.entries, requested=tuple(self.requested)))
            told = EngineCoreOutput("", [])
            put_params(told, news)
            self.outbox.append(told)
            self.entries, self.requested = {}, []
        self._outputs.put_nowait(EngineCoreOutputs(outputs=self.outbox))
        self.outbox = []

    def die(self, *, says_so: bool) -> None:
        self.dead, self.says_dead, self.requests, self.outbox = True, says_so, {}, []
        self.entries, self.requested = {}, []
        if says_so:
            self._outputs.put_nowait(EngineDeadError())


def transfers_of(core: EngineCoreRequest) -> list[dict[str, Any]]:
    """Return what a request says of its items' ways."""
    extra = core.sampling_params.extra_args or {}  # type: ignore[union-attr]
    found: list[dict[str, Any]] = extra.get("ec_transfer_params", {}).get("transfers", [])
    return found


class Store:
    """Look-ups of a store, which has some items; the real one asks by threads."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance

    async def find_items(self, items: Sequence[Any], namespace: str) -> dict[str, StoredItem]:
        found = {}
        for each in items:
            if self._random.random() < 0.3:
                found[each.item_uuid] = StoredItem(f"key of {each.item_uuid}")
        await asyncio.sleep(0)
        return found


class World:
    """A front, and its surroundings.

    Args:
        seed: Of all that is random.
        config: vLLM's, of the front.
        folder: For the secret.

    Attributes:
        happened: What did, for tests of the test.
    """

    def __init__(self, seed: int, config: Any, folder: Path) -> None:
        self.random = random.Random(seed)
        self.happened: Counter[str] = Counter()
        encoders = [f"e-{number}" for number in range(self.random.randint(0, 3))]
        generating = [*CONTROL][: self.random.randint(1, 2)]
        if self.random.random() < 0.4:
            kind = self.random.choice(["p", "p", "ep"])
            encoders += [f"{kind}-{number}" for number in range(self.random.randint(1, 2))]
            generating = [f"d-{number}" for number in range(self.random.randint(1, 2))]
        self.names = [*encoders, *generating]
        self.partial = generating[0] in CONTROL and self.random.random() < 0.2
        self.client: SplitClient = client_of(
            config,
            folder,
            *self.names,
            encode_order=self.random.choice(ORDERS),
            can_encode=not self.partial,
            partial_results=self.partial,
        )
        self.client.words = lambda text: [len(text)]
        if self.random.random() < 0.5:
            self.client._store = Store(self.random)  # type: ignore[assignment]
        self.client._pool.chance = random.Random(seed)
        for _ in range(self.random.choice([0, 0, 97, 100])):
            self.client._retries.spend()
        self.client.fail = self._failed
        self.asked: dict[str, Asked] = {}
        self.lives: dict[str, Life] = {}
        self.writes: list[tuple[Life, dict[str, Any], list[int]]] = []
        self.serving: dict[Life, asyncio.Task[None]] = {}
        self.trace: list[str] = []
        self.items = self.random.sample(ITEMS, self.random.choice([2, 4, len(ITEMS)]))

    async def run(self) -> None:
        """Let things happen, then let all end, and check what is left."""
        reading = asyncio.create_task(self._read())
        for name in self.names:
            self._come(name)
        for _ in range(STEPS):
            await self._happen()
            await self._settle(self.random.randint(0, 6))
        await self._end()
        self._check()
        reading.cancel()
        for life in self.serving:
            life.gone.set()
        await asyncio.gather(*self.serving.values())

    # -- what goes wrong, and what clients do ---------------------------------------------------

    async def _happen(self) -> None:
        what = self.random.choices(
            (self._ask, self._give_up, self._engine_acts, self._bring, self._misfortune),
            (4, 1, 10, 6, 1),
        )[0]
        await what()

    async def _ask(self) -> None:
        count = self.random.choice([0, 1, 1, 2, 3])
        pictures = "".join(self.random.choices(self.items, k=count))
        one = Asked(str(len(self.asked)), pictures, streams=self.random.random() < 0.5)
        self.asked[one.name] = one
        self._note(f"ask {one.name} of {pictures!r}")
        exchange.set(one.exchange)
        try:
            await self.client.add_request_async(request(one.name, pictures))
        except GracefulHTTPError as error:
            assert one.ends == [f"failed: {error}"], one
            self.happened["refused"] += 1

    async def _give_up(self) -> None:
        if open_ := [each for each in self.asked.values() if not each.ends and not each.given_up]:
            one = self.random.choice(open_)
            one.given_up = True
            self.happened["given up"] += 1
            self._note(f"give up {one.name}")
            await self.client.abort_requests_async([one.name])

    async def _misfortune(self) -> None:
        name = self.random.choice(self.names)
        life = self.lives[name]
        if life.dead:
            if life.says_dead or self.random.random() < 0.5:
                self._note(f"{name} is seen to be gone")
                life.gone.set()
            if self.random.random() < 0.7:
                # Sometimes before anybody has seen that it was gone.
                self.happened["came back"] += 1
                self._come(name)
            return
        what = self.random.choice(["die", "die", "say and die", "stop", "drain", "forget"])
        self._note(f"{name}: {what}")
        instance = self.client.engines.by_name[name].instance
        if what == "stop":
            life.stopped = not life.stopped
        elif what == "drain":
            instance.health.drain(not instance.health.draining)
        elif what == "forget":
            for each in [*life.cached]:
                life.lose(each)
            life.kept.clear()
        else:
            life.die(says_so=what == "say and die")
        self.happened[what] += 1

    def _come(self, name: str) -> None:
        self._note(f"{name} comes")
        life = self.lives[name] = Life(name, self._loads)
        engines = self.client.engines
        gone = asyncio.create_task(life.gone.wait())
        serving = engines._serve(engines.by_name[name], life, gone)  # type: ignore[arg-type]
        self.serving[life] = asyncio.create_task(serving)

    def _loads(self, name: str) -> bool:
        found = self.random.random() < 0.7
        self.happened["loaded" if found else "not loaded"] += 1
        return found

    # -- what engines do --------------------------------------------------------------------------

    async def _engine_acts(self, *, well: bool = False) -> None:
        if not (able := [each for each in self.lives.values() if self._is_able(each)]):
            return
        life = self.random.choice(able)
        if life.cached and self.random.random() < 0.1:
            life.lose(self.random.choice([*life.cached]))
        talks = life.outbox or life.has_news
        if talks and (self.random.random() < 0.5 or not life.requests):
            life.arrive()
        elif life.requests:
            core = self.random.choice([*life.requests.values()])
            fails = not well and self.random.random() < 0.05
            extra = core.sampling_params.extra_args or {}  # type: ignore[union-attr]
            kv = extra.get("kv_transfer_params") or {}
            if kv.get("do_remote_decode"):
                self._prefill(life, core, fails)
            elif life.name.startswith("e"):
                self._encode(life, core, fails)
            else:
                self._answer(life, core, fails, kv)

    def _is_able(self, life: Life) -> bool:
        return not (life.dead or life.stopped) and bool(
            life.requests or life.outbox or life.has_news
        )

    def _encode(self, life: Life, core: EngineCoreRequest, fails: bool) -> None:
        (feature,) = core.mm_features or ()
        content = content_of(feature)
        assert content == seen_of(feature.identifier)
        (transfer,) = transfers_of(core)
        consumers = [each for each in self.serving if transfer["transfer_id"] in each.on_demand]
        assert all(each.on_demand[transfer["transfer_id"]] for each in consumers), "nobody asked"
        self.happened["asked for"] += len(consumers)
        signed = (transfer["transfer_id"], transfer["item_uuid"], transfer["consumer"])
        assert self.client.secret.sign_transfer(*signed) == transfer["proof"]
        if fails and self._refuses(life, core):
            return
        if fails:
            self.happened["encode failed"] += 1
            life.put(core.request_id, end=FinishReason.ERROR)
            return
        self._note(f"{life.name} has encoded {core.request_id}")
        self.happened["part encoded"] += "#" in feature.identifier
        self.writes.append((life, transfer, content))
        life.put(core.request_id, end=FinishReason.STOP)

    def _prefill(self, life: Life, core: EngineCoreRequest, fails: bool) -> None:
        seen = [self._seen(life, core, feature) for feature in core.mm_features or ()]
        if fails and self._refuses(life, core):
            return
        if fails:
            self.happened["prefill failed"] += 1
            self._note(f"{life.name} fails {core.request_id}")
            life.put(
                core.request_id, end=self.random.choice([FinishReason.ERROR, FinishReason.STOP])
            )
        elif None not in seen:
            self._note(f"{life.name} has computed {core.request_id}")
            for feature, content in zip(core.mm_features or (), seen, strict=True):
                assert content is not None
                life.keep(feature.identifier, content)
            life.kv[core.request_id] = [*chain.from_iterable(content or () for content in seen)]
            kv = {"do_remote_prefill": True, "of": life.name, "request": core.request_id}
            life.put(core.request_id, 0, end=FinishReason.LENGTH, kv=kv)
        elif any(self._is_lost(life, core, each) for each in core.mm_features or ()):
            life.put(core.request_id, end=FinishReason.ERROR)

    def _refuses(self, life: Life, core: EngineCoreRequest) -> bool:
        """Refuse a job now and then, as a hub does that its engine has not seen."""
        if self.random.random() < 0.6:
            return False
        self._note(f"{life.name} refuses {core.request_id}")
        self.happened["job refused"] += 1
        del life.requests[core.request_id]
        failure = EncodeFailure(kind=FailureKind.ERROR, reason="refuses the job")
        self.client._fail_job(core.request_id, failure)
        return True

    def _answer(self, life: Life, core: EngineCoreRequest, fails: bool, kv: dict[str, Any]) -> None:
        seen = [self._seen(life, core, feature) for feature in core.mm_features or ()]
        if life.name.startswith("d"):
            assert None not in seen, "a decode engine can compute the whole prompt"
        if kv and (read := self.lives[kv["of"]].kv.get(kv["request"])) is not None:
            self.happened["KV read"] += 1
            assert read == [*chain.from_iterable(content or () for content in seen)]
        elif kv:
            self.happened["KV lost"] += 1
        done = life.said.get(core.request_id, 0)
        if not done and fails:
            self.happened["answer failed"] += 1
            self._note(f"{life.name} fails {core.request_id}")
            life.put(core.request_id, end=FinishReason.ERROR)
        elif done or None not in seen:
            self._note(f"{life.name} says more of {core.request_id}")
            # The first time it has all, and keeps it.
            for feature, content in zip(core.mm_features or (), seen, strict=True):
                if content is not None:
                    life.keep(feature.identifier, content)
            name = int(core.request_id.partition("-")[0])
            if done:
                seen = [seen_of(each.identifier) for each in core.mm_features or ()]
            tokens = [name, *chain.from_iterable(content or () for content in seen)]
            life.said[core.request_id] = done + 1
            end = FinishReason.STOP if done + 1 == TOKENS else None
            life.put(core.request_id, *tokens, end=end)
        elif any(self._is_lost(life, core, each) for each in core.mm_features or ()):
            self.happened["held and lost"] += 1
            self._note(f"{life.name} has lost what {core.request_id} needs")
            life.put(core.request_id, end=FinishReason.ERROR)

    def _is_lost(self, life: Life, core: EngineCoreRequest, feature: Any) -> bool:
        """Tell whether an item that a request had found is gone, and nobody brings it."""
        if self._seen(life, core, feature) is not None:
            return False
        (way,) = (e for e in transfers_of(core) if e["item_uuid"] == feature.identifier)
        return life.on_demand.get(way["transfer_id"]) is False

    def _seen(self, life: Life, core: EngineCoreRequest, feature: Any) -> list[int] | None:
        """Return what an item shows, if it is there."""
        if (content := content_of(feature)) is not None:
            assert not self.partial, "it cannot encode"
            self.happened["encoded where it was needed"] += 1
            self.happened["part encoded where it was needed"] += "#" in feature.identifier
            return content
        if feature.identifier in life.cached:
            return life.cached[feature.identifier]
        if (found := life.kept.get((core.request_id, feature.identifier))) is not None:
            self.happened["held"] += 1
            return found
        ways = {each["item_uuid"]: each["transfer_id"] for each in transfers_of(core)}
        return life.brought.get(ways[feature.identifier])

    async def _bring(self, *, well: bool = False) -> None:
        """Let one item that was encoded arrive, if both ends of its way are there.

        What its encoder gives up after its job, as without memory, is asked for once more.
        """
        if not self.writes:
            return
        life, transfer, content = self.writes[self.random.randrange(len(self.writes))]
        if life.stopped:
            return
        self.writes.remove((life, transfer, content))
        engines = self.client.engines.by_name
        (name,) = (
            each for each in engines if engines[each].settings.control == transfer["consumer"]
        )
        if life.dead:
            return
        if not well and self.random.random() < 0.1:
            self.happened["asked for again"] += 1
            self._note(f"{life.name} gives {transfer['transfer_id'][:6]} up")
            self.lives[name].requested.append(transfer["transfer_id"])
        else:
            self.happened["brought"] += 1
            self._note(f"{name} gets {transfer['transfer_id'][:6]}")
            self.lives[name].brought[transfer["transfer_id"]] = content

    # -- what comes of it -------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            for each in (await self.client.get_output_async()).outputs:
                one = self.asked[each.request_id]
                if one.given_up:
                    continue
                assert not one.ends, f"{one} goes on after its end: {each}"
                one.tokens += each.new_token_ids
                one.exchange.begun |= one.streams
                if each.finish_reason is not None:
                    one.ends.append(str(each.finish_reason))
                    self._note(f"{one.name} ends: {each.finish_reason}")

    def _failed(self, request_id: str, error: Exception) -> None:
        self._note(f"{request_id} fails: {error}")
        assert isinstance(error, GracefulHTTPError), repr(error)
        one = self.asked[request_id]
        assert not one.exchange.begun, "a stream that has begun is not refused"
        one.ends.append(f"failed: {error}")
        self.happened["failed after a token" if one.tokens else "failed"] += 1

    async def _end(self) -> None:
        """Let nothing go wrong any more until everybody is answered."""
        self._note("the end begins")
        for name, life in [*self.lives.items()]:
            life.stopped = False
            self.client.engines.by_name[name].instance.health.drain(False)
            if life.dead:
                life.gone.set()
                await self._settle(10)
                self._come(name)
        await self._settle(10)
        for _ in range(MOST_STEPS):
            if not any(map(self._is_able, self.lives.values())) and not self.writes:
                await self._settle(20)
                if not any(map(self._is_able, self.lives.values())):
                    return
            await self._engine_acts(well=True)
            await self._bring(well=True)
            await self._settle(2)

    def _check(self) -> None:
        client = self.client
        for one in self.asked.values():
            if not one.given_up:
                assert len(one.ends) == 1, f"{one} has ended {len(one.ends)} times"
            if self.partial:
                self._check_parts(one)
                continue
            assert one.tokens == one.answer[: len(one.tokens)], f"{one} is not {one.answer}"
            if one.ends == [str(FinishReason.STOP)]:
                self.happened["answered"] += 1
                assert one.tokens == one.answer
        assert not (client._open or client._at_engines or client._jobs.open)
        for name, engine in client.engines.by_name.items():
            assert (engine.instance.load, engine.instance.pending_encode_s) == (0, 0), name
            assert engine.instance.idle and not engine.instance.item_jobs, name
            assert not self.lives[name].requests, f"{name} still has requests"

    def _check_parts(self, one: Asked) -> None:
        """Check a response that may do without some items, in each of its parts."""
        if one.ends != [str(FinishReason.STOP)]:
            return
        size = len(one.tokens) // TOKENS
        part, whole = one.tokens[:size], iter(one.answer[: len(one.answer) // TOKENS])
        assert one.tokens == part * TOKENS, f"{one} is not one response"
        assert all(each in whole for each in part), f"{one} is not {one.answer}"
        self.happened["without an item"] += size < len(one.answer) // TOKENS

    async def _settle(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    def _note(self, line: str) -> None:
        self.trace.append(line)
