"""Who gets what of a request: by rings of hashes and loads, or as a configuration says.

The first is the default, and takes as long among thousands of instances as among two. The second
looks at every instance for every choice.
"""

from __future__ import annotations

import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from epd_portable.config.roles import Duty
from epd_portable.router.choice import prefix
from epd_portable.router.choice.explanation import Explanation
from epd_portable.router.choice.holdings import Beginnings, Holdings
from epd_portable.router.choice.policy import Policy
from epd_portable.router.choice.profile import MOST_SHOWN, Decision
from epd_portable.router.choice.situation import ROLE_LABEL, Need, Stage
from epd_portable.router.choice.tokens import cached_tokens
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.fleet.engine_loads import EngineLoads
from epd_portable.router.fleet.instances import Fleet, Instance
from epd_portable.router.fleet.tally import RowChanges

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"
_SALTS = ("tools", "chat_template", "chat_template_kwargs", "system", "instructions")
"""Fields that stand before the messages in a prompt, or change all of it."""
_PROMPTS = ("messages", "input", "prompt")
"""Fields that hold a prompt, by the interface."""
_raws = msgspec.json.Decoder(list[msgspec.Raw])


class Choosing(ABC):
    """The choices for one request.

    Args:
        key: The request's id, for the log.
        explanation: See below.

    Attributes:
        key: See above.
        explanation: Is told of each choice; ``None`` if nobody wants to know.
    """

    __slots__ = ("explanation", "key")

    def __init__(self, key: str, explanation: Explanation | None) -> None:
        self.key = key
        self.explanation = explanation

    def tell(self, decision: Decision) -> None:
        """Tell of a choice, where somebody wants to know."""
        if self.explanation is not None:
            self.explanation.decisions.append(decision)
            logger.debug("request %s: %s", self.key, json.dumps(decision.shown()))

    @abstractmethod
    def pd(self, tried: Collection[str]) -> Instance | None:
        """Return the usable PD instance that should answer; ``None`` if there is none.

        Args:
            tried: Names of instances that must not get it.
        """

    @abstractmethod
    def prefills(self, decode: Instance) -> bool:
        """Tell whether another instance should prefill for the one that decodes."""

    @abstractmethod
    def prefill(self, tried: Collection[str]) -> Instance | None:
        """Return the usable instance that should; ``None`` if there is none.

        Args:
            tried: Names of instances that must not.
        """

    @abstractmethod
    def apart(self, items: Sequence[MediaItem], pd: Instance) -> Sequence[MediaItem]:
        """Return those of the items that encode instances should encode, in their order."""

    def encoders(self, items: Sequence[MediaItem]) -> list[Instance | None]:
        """Return the usable encode instance that should have each of some items."""
        with contextlib.ExitStack() as reserved:
            return [_reserved(self.encoder(item, ()), item, reserved) for item in items]

    @abstractmethod
    def encoder(self, item: MediaItem, exclude: Collection[str]) -> Instance | None:
        """Return the usable encode instance that should have an item.

        Args:
            item: Of the request.
            exclude: Names of instances that must not have it.
        """

    @abstractmethod
    def asks(self, pd: Instance, items: Iterable[MediaItem]) -> int:
        """Note that a PD instance is asked, and gets these items.

        Returns:
            Tokens of the prompt that it most likely has to compute; 0 if nobody wants to know.
        """

    @abstractmethod
    def encodes(self, item: MediaItem, encoder: Instance) -> None:
        """Note that an encode instance is asked for an item."""

    @abstractmethod
    def has_not(self, item: MediaItem, encoder: Instance) -> None:
        """Note that it has not encoded it."""


class Chooser(Protocol):
    """Chooses for all requests."""

    def begin(
        self, call: Call, headers: Mapping[str, str], explanation: Explanation | None
    ) -> Choosing:
        """Return the choices for one request.

        Args:
            call: The request.
            headers: Of the request; ``x-request-id`` is among them.
            explanation: Is told of each choice, if somebody wants to know.
        """


def _telling(explanation: Explanation | None) -> Explanation | None:
    """Return who is to be told: the log wants to know, too."""
    if explanation is None and logger.isEnabledFor(logging.DEBUG):
        return Explanation()
    return explanation


# By rings.


class RingChooser:
    """The default: items by hash and under a load bound, requests to who has least to do.

    Args:
        instances: Who is there.
    """

    def __init__(self, instances: Fleet) -> None:
        self._instances = instances

    def begin(
        self, call: Call, headers: Mapping[str, str], explanation: Explanation | None
    ) -> Choosing:
        """See `Chooser`."""
        return _ByRings(self._instances, headers["x-request-id"], _telling(explanation))


class _ByRings(Choosing):
    __slots__ = ("_instances",)

    def __init__(self, instances: Fleet, key: str, explanation: Explanation | None) -> None:
        super().__init__(key, explanation)
        self._instances = instances

    def pd(self, tried: Collection[str]) -> Instance | None:
        chosen = self._instances.prefill_decode(tried)
        if self.explanation is not None:
            self._explain("answer", Decision(stage="decode"), chosen, tried)
        return chosen

    def prefills(self, decode: Instance) -> bool:
        return True

    def prefill(self, tried: Collection[str]) -> Instance | None:
        chosen = self._instances.prefill_decode(tried, "prefill")
        if self.explanation is not None:
            self._explain("prefill", Decision(stage="prefill"), chosen, tried)
        return chosen

    def apart(self, items: Sequence[MediaItem], pd: Instance) -> Sequence[MediaItem]:
        return items

    def encoder(self, item: MediaItem, exclude: Collection[str]) -> Instance | None:
        chosen = self._instances.encoder(item.mm_hash, exclude)
        if self.explanation is not None:
            self._explain("encode", Decision(stage="encode", item=item.mm_hash), chosen, exclude)
        return chosen

    def asks(self, pd: Instance, items: Iterable[MediaItem]) -> int:
        return 0

    def encodes(self, item: MediaItem, encoder: Instance) -> None:
        pass

    def has_not(self, item: MediaItem, encoder: Instance) -> None:
        pass

    def _explain(
        self, duty: Duty, decision: Decision, chosen: Instance | None, exclude: Collection[str]
    ) -> None:
        decision.profile = "default"
        decision.filters["there"] = len(self._instances.of_duty(duty))
        tiers = list(_left(self._instances, duty, exclude))
        decision.filters["usable"] = sum(map(len, tiers))
        first = next(filter(None, tiers), ())
        for each in sorted(first, key=lambda one: one.load)[:MOST_SHOWN]:
            decision.totals[each.name] = -each.load
        if chosen is None:
            decision.reason = "nobody is left"
        else:
            decision.winner = chosen.name
            decision.totals[chosen.name] = -chosen.load
            by = "an item's hash, within the load bound" if duty == "encode" else "the least load"
            decision.reason = f"by {by}; total is the load, below zero"
        self.tell(decision)


# By a policy.


class Observed:
    """An instance as a policy sees it, as it was when it was looked at last; a `Contender`.

    Attributes:
        instance: See above.
        name: Of the instance, as the next ones.
    """

    __slots__ = (
        *("_loads", "computes_for", "holdings", "instance", "labels", "load", "name", "owed_s"),
        *("reported", "role", "tokens", "version", "weight"),
    )

    def __init__(self, instance: Instance, holdings: Holdings, loads: EngineLoads | None) -> None:
        self._loads = loads
        self.instance = instance
        self.name = instance.name
        self.role: str = instance.role
        self.labels: Mapping[str, str] = {ROLE_LABEL: instance.role, **instance.settings.labels}
        self.weight = instance.weight
        self.holdings = holdings
        self.version = 0
        self.look()

    def look(self) -> None:
        """Take over how busy it is."""
        self.version += 1
        self.load = self.instance.load
        self.owed_s = self.instance.owed_s
        self.computes_for = self.instance.computes_for
        self.tokens = self.instance.prompt_tokens
        self.reported = None if self._loads is None else self._loads.of(self.instance)


class PolicyChooser:
    """Chooses as a configuration says.

    What instances hold is known by each process of a router by itself, of what it has sent.

    Args:
        instances: Who is there.
        policy: The configuration.
        deciders: Whether PD instances can encode items of their requests: else nobody decides that
            they do.
        loads: What instances say of themselves, if the configuration wants that.
    """

    def __init__(
        self,
        instances: Fleet,
        policy: Policy,
        *,
        deciders: bool,
        loads: EngineLoads | None = None,
    ) -> None:
        self._loads = loads
        self.policy = policy
        self.instances = instances
        self.deciders = deciders
        self.beginnings: Beginnings = {}
        self._observed: dict[Instance, Observed] = {}
        self._tiers: dict[Duty, list[tuple[Observed, ...]]] = {}
        self._rows: dict[int, Observed] = {}
        self._changes: RowChanges | None = None
        for instance in instances.all:
            self._changed(instance)
        instances.watch(self._changed)

    def begin(
        self, call: Call, headers: Mapping[str, str], explanation: Explanation | None
    ) -> Choosing:
        """See `Chooser`."""
        return _ByPolicy(self, call, headers, _telling(explanation))

    def tiers(self, duty: Duty, exclude: Collection[str]) -> Iterator[Sequence[Observed]]:
        """Yield whom to choose from: those that are preferred, then the other usable ones.

        Without anybody to exclude they are the same objects until an instance changes.
        """
        self._look()
        tiers = self._tiers.get(duty)
        if tiers is None:
            found = self.instances.tiers(duty)
            tiers = [tuple(self._observed[each] for each in tier) for tier in found]
            self._tiers[duty] = tiers
        for tier in tiers:
            yield [each for each in tier if each.name not in exclude] if exclude else tier

    def observed(self, instance: Instance) -> Observed:
        """Return an instance as the policy sees it."""
        found = self._observed.get(instance)
        if found is None:
            # It has left: what it has is of no use to anybody.
            return Observed(instance, Holdings(), self._loads)
        found.look()
        return found

    def _look(self) -> None:
        """Look at those instances that have been given something, or have told their load."""
        if self._changes is None:
            self._changes = RowChanges(self.instances.tally, self._rows)
        for row in self._changes.take():
            if observed := self._rows.get(row):
                observed.look()
        for instance in self._loads.news() if self._loads is not None else ():
            if observed := self._observed.get(instance):
                observed.look()

    def _of(self, instance: Instance) -> Observed:
        policy = self.policy
        holdings = Holdings(
            items=policy.kept_items, blocks=policy.kept_blocks, beginnings=self.beginnings
        )
        return Observed(instance, holdings, self._loads)

    def _changed(self, instance: Instance) -> None:
        self._tiers.clear()
        if self.instances.get(instance.name) is not instance:
            if observed := self._observed.pop(instance, None):
                observed.holdings.clear()
                del self._rows[instance.row]
        elif instance not in self._observed:
            self._observed[instance] = self._rows[instance.row] = self._of(instance)
            self._changes = None
        elif not instance.healthy:
            # Who comes back may be another process.
            self._observed[instance].holdings.clear()


class _ByPolicy(Choosing):
    def __init__(
        self,
        chooser: PolicyChooser,
        call: Call,
        headers: Mapping[str, str],
        explanation: Explanation | None,
    ) -> None:
        super().__init__(headers["x-request-id"], explanation)
        self._chooser = chooser
        self._policy = chooser.policy
        self._call = call
        self._session = headers.get(SESSION_HEADER, "") or _text(call, "session_id")
        self._profile = headers.get(chooser.policy.profile_header, "").strip()
        self._read: prefix.Prompt | None = None
        self._chance = f"{chooser.instances.chance.getrandbits(64):x}"

    def pd(self, tried: Collection[str]) -> Instance | None:
        return self._chosen("answer", self._need("decode"), tried)

    def prefills(self, decode: Instance) -> bool:
        why = self._policy.apart(self._need("prefill"), self._chooser.observed(decode))
        if why:
            self.tell(Decision(stage="prefill", winner=decode.name, reason=why))
        return not why

    def prefill(self, tried: Collection[str]) -> Instance | None:
        return self._chosen("prefill", self._need("prefill"), tried)

    def apart(self, items: Sequence[MediaItem], pd: Instance) -> Sequence[MediaItem]:
        if not self._chooser.deciders:
            return items
        decode = self._chooser.observed(pd)
        left = []
        for item in items:
            why = self._policy.apart(self._need("encode", item), decode)
            if not why:
                left.append(item)
            else:
                self.tell(Decision(stage="encode", item=item.mm_hash, winner=pd.name, reason=why))
        return left

    def encoder(self, item: MediaItem, exclude: Collection[str]) -> Instance | None:
        return self._chosen("encode", self._need("encode", item), exclude)

    def asks(self, pd: Instance, items: Iterable[MediaItem]) -> int:
        observed, need = self._chooser.observed(pd), self._need("decode")
        [cached] = cached_tokens(need, [observed])
        observed.holdings.items.use(item.mm_hash for item in items)
        observed.holdings.use_prefix(need.blocks)
        return need.tokens - cached

    def encodes(self, item: MediaItem, encoder: Instance) -> None:
        self._chooser.observed(encoder).holdings.items.use((item.mm_hash,))

    def has_not(self, item: MediaItem, encoder: Instance) -> None:
        self._chooser.observed(encoder).holdings.items.forget(item.mm_hash)

    def _chosen(self, duty: Duty, need: Need, exclude: Collection[str]) -> Instance | None:
        for contenders in self._chooser.tiers(duty, exclude):
            if not contenders:
                continue
            decision = None
            if self.explanation is not None:
                item = need.item.mm_hash if need.item else ""
                decision = Decision(stage=need.stage, item=item)
            chosen = self._policy.choose(need, contenders, decision)
            if decision is not None:
                self.tell(decision)
            if chosen is not None:
                return chosen.instance
        return None

    def _need(self, stage: Stage, item: MediaItem | None = None) -> Need:
        prompt = self._prompt() if item is None else prefix.Prompt()
        return Need(
            stage=stage,
            key=self._chance,
            model=self._call.model,
            session=self._session,
            items=self._call.items,
            item=item,
            blocks=prompt.blocks,
            having=self._chooser.beginnings.get(prompt.blocks[0], ()) if prompt.blocks else (),
            nbytes=prompt.nbytes,
            ends=prompt.ends,
            profile=self._profile,
        )

    def _prompt(self) -> prefix.Prompt:
        if self._read is None:
            policy = self._policy
            self._read = prefix.Prompt()
            if policy.wants_blocks:
                self._read = prefix.chain(
                    pieces(self._call),
                    block_bytes=policy.block_bytes,
                    most=policy.most_blocks,
                    salt=_salt(self._call),
                    items={
                        b'"%b"' % item.mm_hash.encode(): policy.item_tokens(item)
                        for item in self._call.items
                    },
                )
        return self._read


def pieces(call: Call) -> Iterator[Iterable[prefix.Piece]]:
    """Yield what each message of a prompt is made of; of an item, its name."""
    for name in _PROMPTS:
        given = call.fields.get(name)
        if given is None:
            continue
        if isinstance(given, msgspec.Raw):
            is_list = bytes(memoryview(given)[:1]) == b"["
            given = _raws.decode(given) if is_list and name != "prompt" else [given]
        assert isinstance(given, Sequence)
        for message in given:
            yield _of_message(call, message)
        return


def _of_message(call: Call, message: object) -> Iterator[prefix.Piece]:
    if isinstance(message, msgspec.Raw):
        yield from call.cut.segments(bytes(message))
    elif isinstance(message, Mapping) and "uuid" in message:
        yield bytes(message["uuid"])
    elif isinstance(message, Mapping):
        for name, value in message.items():
            yield name.encode()
            yield from _of_message(call, value)
    elif isinstance(message, Sequence):
        for part in message:
            yield from _of_message(call, part)


def _salt(call: Call) -> bytes:
    given = (call.fields.get(name) for name in _SALTS)
    raws = [bytes(each) if isinstance(each, msgspec.Raw) else b"" for each in given]
    return b"\0".join([call.model.encode(), *map(call.cut.whole, raws)])


def _text(call: Call, name: str) -> str:
    raw = call.fields.get(name)
    if not isinstance(raw, msgspec.Raw) or bytes(memoryview(raw)[:1]) != b'"':
        return ""
    return call.cut.whole(bytes(raw)).decode("utf-8", "replace")


def _reserved(
    encoder: Instance | None, item: MediaItem, reserved: contextlib.ExitStack
) -> Instance | None:
    """Return an encoder whose job is not in flight yet: the next item's choice must see it."""
    if encoder is not None:
        reserved.enter_context(encoder.working(item.mm_hash))
    return encoder


def _left(instances: Fleet, duty: Duty, exclude: Collection[str]) -> Iterator[Sequence[Instance]]:
    for tier in instances.tiers(duty):
        yield [each for each in tier if each.name not in exclude] if exclude else tier
