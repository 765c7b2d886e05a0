"""Candidates and requests for tables of situations, and what plug-ins make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd_portable.config.roles import ROLE_LABEL, Stage
from epd_portable.media.limits import Modality
from epd_portable.placement.estimates import CacheEstimate, CacheSizes, Prompt
from epd_portable.placement.instances import LoadReport
from epd_portable.placement.profiles.catalogue import make_plugin
from epd_portable.placement.profiles.selection_types import (
    Decider,
    Filter,
    ScorePicker,
    Scorer,
    SelectionRequest,
)


@dataclass(frozen=True, kw_only=True)
class Picture:
    item_uuid: str = "p"
    modality: Modality = "image"
    pixels: int = 0


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """An instance, as far as choices read it, that is only data."""

    name: str
    role: str = "prefill-decode"
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    load: int = 0
    pending_encode_s: float = 0.0
    tokens: int = 0
    reported: LoadReport | None = None
    cached: CacheEstimate = field(default_factory=lambda: CacheEstimate(CacheSizes()))

    def __post_init__(self) -> None:
        self.labels = {ROLE_LABEL: self.role, **self.labels}


def seen(name: str, **more: Any) -> Any:
    return Snapshot(name=name, **more)


def with_load(*loads: int, **more: Any) -> list[Snapshot]:
    return [seen(f"i{n}", load=load, **more) for n, load in enumerate(loads)]


def having(
    name: str, *, items: Sequence[str] = (), blocks: Sequence[int] = (), **more: Any
) -> Snapshot:
    cached = CacheEstimate(CacheSizes())
    cached.items.use(items)
    cached.use_prefix(blocks)
    return seen(name, cached=cached, **more)


def asked(
    stage: Stage = "decode", key: str = "k", blocks: Sequence[int] = (), **more: Any
) -> SelectionRequest:
    """A request; of a prompt of blocks of 64 tokens each, unless it is said otherwise."""
    ends = more.pop("ends", [64 * (n + 1) for n in range(len(blocks))])
    prompt = Prompt(tuple(blocks), tuple(ends), more.pop("tokens", 0))
    return SelectionRequest(stage=stage, key=key, prompt=prompt, **more)


def to_encode(
    item_uuid: str = "p", modality: Modality = "image", pixels: int = 0
) -> SelectionRequest:
    item = Picture(item_uuid=item_uuid, modality=modality, pixels=pixels)
    return asked("encode", items=(item,), item=item)


def kept(kind: str, need: SelectionRequest, there: Sequence[Snapshot], **parameters: Any) -> str:
    """Return the names of those that a filter keeps."""
    one = make_plugin(kind, kind, parameters)
    assert isinstance(one, Filter)
    return " ".join(each.name for each in one.keep(need, there))


def scores(
    kind: str, there: Sequence[Snapshot], need: SelectionRequest | None = None, **parameters: Any
) -> list[float]:
    one = make_plugin(kind, kind, parameters)
    assert isinstance(one, Scorer)
    return [round(score, 3) for score in one.score(need or asked(), there)]


def picker(kind: str) -> ScorePicker:
    one = make_plugin(kind, kind, {"maxNumOfEndpoints": 1})
    assert isinstance(one, ScorePicker)
    return one


def decided(
    kind: str, need: SelectionRequest, known: Sequence[int] = (), **parameters: Any
) -> bool:
    """Return what a decider says where the instance that decodes has some blocks."""
    one = make_plugin(kind, kind, parameters)
    assert isinstance(one, Decider)
    return one.disaggregate(need, having("d", blocks=known))
