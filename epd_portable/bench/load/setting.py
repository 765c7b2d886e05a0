"""What is measured, on what: known before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd_portable.bench.load.plan import LoadPlan
from epd_portable.bench.load.sides import Allotment, LoadSide
from epd_portable.config.instance import PlatformName
from epd_portable.config.schema import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSetting:
    """A whole measurement, before its results.

    Attributes:
        sides: The first is compared with the others.
        topologies: Of each side, with all settings; of plain vLLM the one whose arguments it gets.
        settings: Keys that all topologies have otherwise, the model among them.
        allotment: Which cores or devices each side gets.
        folder: For logs, in a folder for each side.
        upstream_proxy: File of the proxy of vLLM's example; ``None`` where no side is that example.
    """

    plan: LoadPlan
    sides: tuple[LoadSide, ...]
    platform: PlatformName
    topologies: dict[str, Topology]
    settings: tuple[str, ...]
    allotment: Allotment
    folder: Path
    upstream_proxy: Path | None
