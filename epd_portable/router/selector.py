"""Which instances get a request and its items: by the default rules, or as a configuration says."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from epd_portable.config.roles import Duty
from epd_portable.media.limits import estimated_tokens
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.placement.profiles.policy import Policy
from epd_portable.placement.profiles.selection_types import (
    MOST_SHOWN,
    NO_PROMPT,
    SESSION_HEADER,
    Decision,
    Explanation,
    Prompt,
    SelectionRequest,
    Stage,
)
from epd_portable.router import prefix
from epd_portable.router.contents.body import Call, prompt_pieces, prompt_salt, text_field
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.prefix import BYTES_A_TOKEN

logger = logging.getLogger(__name__)


class Selection:
    """The choices for one request, by the default rules.

    Items go by hash and under a load bound, requests to the least loaded instance.

    Args:
        key: The request's id, for the log.
        explanation: Collects the reasons; ``None`` for nowhere but the log, at level DEBUG.
    """

    __slots__ = ("call", "explanation", "instances", "key")

    def __init__(
        self, instances: EndpointPool, call: Call, key: str, explanation: Explanation | None
    ) -> None:
        if explanation is None and logger.isEnabledFor(logging.DEBUG):
            explanation = Explanation()
        self.instances = instances
        self.call = call
        self.key = key
        self.explanation = explanation

    @property
    def is_elastic(self) -> bool:
        """Whether the PD instance may encode items by itself because that ends sooner."""
        return True

    def record(self, decision: Decision) -> None:
        """Add a decision to the explanation, if there is one."""
        if self.explanation is not None:
            self.explanation.decisions.append(decision)
            logger.debug("request %s: %s", self.key, json.dumps(decision.shown()))

    def choose_pd(self, tried: Collection[str]) -> Instance | None:
        """Return the usable PD instance that should answer; ``None`` if there is none.

        Instances that ``tried`` names must not get it.
        """
        return self._explained("answer", self.instances.choose_least_loaded(tried), tried)

    def disaggregates_prefill(self, decode: Instance) -> bool:
        """Return whether another instance should prefill for the one that decodes."""
        return True

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        """Return the usable instance that should prefill, see `choose_pd`."""
        chosen = self.instances.choose_least_loaded(tried, "prefill")
        return self._explained("prefill", chosen, tried)

    def items_to_encode(self, items: Sequence[MediaItem], pd: Instance) -> Sequence[MediaItem]:
        """Return those of the items that encode instances should encode, in their order."""
        return items

    def choose_encoder(self, item: MediaItem, exclude: Collection[str]) -> Instance | None:
        """Return the usable encode instance that should have an item, see `choose_pd`."""
        chosen = self.instances.choose_encoder(item.item_uuid, exclude)
        return self._explained("encode", chosen, exclude, item.item_uuid)

    def note_request(self, pd: Instance, items: Iterable[MediaItem]) -> int:
        """Note that a PD instance is asked, and gets these items.

        Returns:
            Tokens of the prompt that it most likely has to compute; 0 of a body that is not read.
        """
        nbytes = sum(len(piece) for message in prompt_pieces(self.call) for piece in message)
        return nbytes // BYTES_A_TOKEN + sum(map(estimated_tokens, self.call.items))

    def note_encode_job(self, item: MediaItem, encoder: Instance, *, failed: bool = False) -> None:
        """Note that an encode instance is asked for an item, or that it has not encoded it."""

    def _explained(
        self, duty: Duty, chosen: Instance | None, exclude: Collection[str], item: str = ""
    ) -> Instance | None:
        """Explain a choice, if anybody wants to know, and return it."""
        if self.explanation is None:
            return chosen
        stage: Stage = "decode" if duty == "answer" else duty
        decision = Decision(stage=stage, item=item, profile="default")
        decision.filters["there"] = len(self.instances.of_duty(duty))
        tiers = [_without(tier, exclude) for tier in self.instances.tiers(duty)]
        decision.filters["usable"] = sum(map(len, tiers))
        first = next(filter(None, tiers), ())
        for each in sorted(first, key=lambda one: one.load)[:MOST_SHOWN]:
            decision.totals[each.name] = -each.load
        if chosen is None:
            decision.reason = "no instance is left"
        else:
            decision.winner = chosen.name
            decision.totals[chosen.name] = -chosen.load
            by = "an item's hash, within the load bound" if duty == "encode" else "the least load"
            decision.reason = f"by {by}; total is the load, below zero"
        self.record(decision)
        return chosen


@dataclass(frozen=True, slots=True)
class EndpointSelector:
    """Makes the choices for all requests.

    Attributes:
        policy: A configuration, which rates every instance; ``None`` for the default rules, whose
            cost does not grow with the number of instances.
        deciders: Whether PD instances can encode items of their requests: else no decider is asked.
    """

    instances: EndpointPool
    policy: Policy | None = None
    deciders: bool = True

    def start_selection(
        self, call: Call, headers: Mapping[str, str], explanation: Explanation | None
    ) -> Selection:
        """Return the choices for one request, whose headers include ``x-request-id``."""
        if self.policy is None:
            return Selection(self.instances, call, headers["x-request-id"], explanation)
        return _PolicySelection(self, self.policy, call, headers, explanation)


class _PolicySelection(Selection):
    """The choices for one request, by a configuration."""

    def __init__(
        self,
        selector: EndpointSelector,
        policy: Policy,
        call: Call,
        headers: Mapping[str, str],
        explanation: Explanation | None,
    ) -> None:
        super().__init__(selector.instances, call, headers["x-request-id"], explanation)
        self._selector = selector
        self._policy = policy
        self._session = headers.get(SESSION_HEADER, "") or text_field(call, "session_id")
        self._profile = headers.get(policy.profile_header, "").strip()
        self._read: Prompt | None = None
        self._chance = f"{self.instances.chance.getrandbits(64):x}"

    def choose_pd(self, tried: Collection[str]) -> Instance | None:
        return self._choose("answer", self._request("decode"), tried)

    def disaggregates_prefill(self, decode: Instance) -> bool:
        why = self._policy.why_together(self._request("prefill"), decode)
        if why:
            self.record(Decision(stage="prefill", winner=decode.name, reason=why))
        return not why

    def choose_prefill(self, tried: Collection[str]) -> Instance | None:
        return self._choose("prefill", self._request("prefill"), tried)

    def items_to_encode(self, items: Sequence[MediaItem], pd: Instance) -> Sequence[MediaItem]:
        if not self._selector.deciders:
            return items
        left = []
        for item in items:
            why = self._policy.why_together(self._request("encode", item), pd)
            if why:
                name = item.item_uuid
                self.record(Decision(stage="encode", item=name, winner=pd.name, reason=why))
            else:
                left.append(item)
        return left

    def choose_encoder(self, item: MediaItem, exclude: Collection[str]) -> Instance | None:
        return self._choose("encode", self._request("encode", item), exclude)

    def note_request(self, pd: Instance, items: Iterable[MediaItem]) -> int:
        request = self._request("decode")
        [cached] = request.cached_tokens([pd])
        if pd in self.instances:
            pd.cached.items.use(item.item_uuid for item in items)
            pd.cached.use_prefix(request.blocks)
        return request.prompt.tokens - cached

    def note_encode_job(self, item: MediaItem, encoder: Instance, *, failed: bool = False) -> None:
        if failed:
            encoder.cached.items.pop(item.item_uuid, None)
        elif encoder in self.instances:
            encoder.cached.items.use((item.item_uuid,))

    def _choose(
        self, duty: Duty, request: SelectionRequest, exclude: Collection[str]
    ) -> Instance | None:
        for tier in self.instances.tiers(duty):
            if not (candidates := _without(tier, exclude)):
                continue
            decision = None
            if self.explanation is not None:
                item = request.item.item_uuid if request.item else ""
                decision = Decision(stage=request.stage, item=item)
            chosen = self._policy.choose(request, candidates, decision)
            if decision is not None:
                self.record(decision)
            if chosen is not None:
                return chosen
        return None

    def _request(self, stage: Stage, item: MediaItem | None = None) -> SelectionRequest:
        prompt = self._prompt() if item is None else NO_PROMPT
        return SelectionRequest(
            stage=stage,
            key=self._chance,
            model=self.call.model,
            session=self._session,
            items=self.call.items,
            item=item,
            prompt=prompt,
            having=self.instances.caches.with_prefix(prompt.blocks),
            profile=self._profile,
        )

    def _prompt(self) -> Prompt:
        if self._read is None:
            policy = self._policy
            self._read = NO_PROMPT
            if policy.wants_blocks:
                self._read = prefix.chain(
                    prompt_pieces(self.call),
                    block_bytes=policy.block_tokens * BYTES_A_TOKEN,
                    most=policy.most_blocks,
                    salt=prompt_salt(self.call),
                    items={
                        b'"%b"' % item.item_uuid.encode(): estimated_tokens(item)
                        for item in self.call.items
                    },
                )
        return self._read


def _without(tier: Sequence[Instance], exclude: Collection[str]) -> Sequence[Instance]:
    return [each for each in tier if each.name not in exclude] if exclude else tier
