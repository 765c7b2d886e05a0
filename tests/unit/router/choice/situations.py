"""Contenders and needs for tables of situations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd_portable.media.formats import Modality
from epd_portable.router.choice.holdings import Holdings
from epd_portable.router.choice.situation import Need, Snapshot, Stage


@dataclass(frozen=True, kw_only=True)
class Picture:
    mm_hash: str = "p"
    modality: Modality = "image"
    pixels: int = 0


def seen(name: str, **more: Any) -> Snapshot:
    return Snapshot(name=name, **more)


def with_load(*loads: int, **more: Any) -> list[Snapshot]:
    return [seen(f"i{n}", load=load, **more) for n, load in enumerate(loads)]


def having(name: str, *, items: Sequence[str] = (), blocks: Sequence[int] = ()) -> Snapshot:
    holdings = Holdings()
    holdings.items.use(items)
    holdings.use_prefix(blocks)
    return seen(name, holdings=holdings)


def asked(stage: Stage = "decode", key: str = "k", **more: Any) -> Need:
    return Need(stage=stage, key=key, **more)


def to_encode(mm_hash: str = "p", modality: Modality = "image", pixels: int = 0) -> Need:
    item = Picture(mm_hash=mm_hash, modality=modality, pixels=pixels)
    return asked("encode", items=(item,), item=item)
