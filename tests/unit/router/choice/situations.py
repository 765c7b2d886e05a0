"""Candidates and requests for tables of situations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd_portable.delivery.caches import CacheEstimate, CacheSizes
from epd_portable.media.limits import Modality
from epd_portable.router.choice.selection_types import SelectionRequest, Stage
from epd_portable.wire.messages import LoadReport


@dataclass(frozen=True, kw_only=True)
class Picture:
    item_uuid: str = "p"
    modality: Modality = "image"
    pixels: int = 0


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """A candidate that is only data."""

    name: str
    role: str = "prefill-decode"
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    load: int = 0
    pending_encode_s: float = 0.0
    computes_for: int = 0
    tokens: int = 0
    reported: LoadReport | None = None
    cached: CacheEstimate = field(default_factory=CacheSizes().new_estimate)


def seen(name: str, **more: Any) -> Snapshot:
    return Snapshot(name=name, **more)


def with_load(*loads: int, **more: Any) -> list[Snapshot]:
    return [seen(f"i{n}", load=load, **more) for n, load in enumerate(loads)]


def having(name: str, *, items: Sequence[str] = (), blocks: Sequence[int] = ()) -> Snapshot:
    cached = CacheSizes().new_estimate()
    cached.items.use(items)
    cached.use_prefix(blocks)
    return seen(name, cached=cached)


def asked(stage: Stage = "decode", key: str = "k", **more: Any) -> SelectionRequest:
    return SelectionRequest(stage=stage, key=key, **more)


def to_encode(
    item_uuid: str = "p", modality: Modality = "image", pixels: int = 0
) -> SelectionRequest:
    item = Picture(item_uuid=item_uuid, modality=modality, pixels=pixels)
    return asked("encode", items=(item,), item=item)
