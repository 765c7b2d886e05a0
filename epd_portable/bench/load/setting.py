"""What is measured, on what: known before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd_portable.bench.load.plan import LoadPlan
from epd_portable.bench.load.sides import Allotment, LoadSide
from epd_portable.config.groups import Instances
from epd_portable.config.instance import PlatformName
from epd_portable.config.schema import Topology
from epd_portable.launch.plan.placement import ranks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSetting:
    """A whole measurement, before its results.

    Attributes:
        sides: The first is compared with the others.
        topologies: Of each side, with all settings; of plain vLLM the one whose arguments it gets.
        settings: Keys that all topologies have otherwise, the model among them.
        allotment: Which cores or devices each side gets.
        folder: For logs, a folder for each side.
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

    def folder_of(self, side: LoadSide) -> Path:
        """Return the folder of a side, which is made if it is not there."""
        folder = self.folder / side.name
        folder.mkdir(exist_ok=True)
        return folder

    def cores_of(self, side: LoadSide) -> dict[str, list[int]]:
        """Return the cores of each group of instances of a topology; empty if none is bound."""
        if not self.allotment.binds_cores:
            return {}
        units = iter(self.allotment.units[side.name])
        groups = self.topologies[side.name].instances
        return {
            name: [
                int(core) for _ in range(ranks_of(getattr(groups, name))) for core in next(units)
            ]
            for name in Instances.model_fields
        }
