"""Sides of a measurement, and the cores or devices of each: the same for all. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from epd_portable.config.groups import Instances
from epd_portable.config.instance import PlatformName
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import ranks_of

EXAMPLES = "ours=configs/1e1pd.yaml, replicas:2, upstream:1E1PD, there=url:http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSide:
    """A side of a measurement.

    Attributes:
        kind: ``topology``, ``replicas`` of plain vLLM, ``upstream`` (vLLM's example), or ``url``.
        what: The option without the name.
        settings: Keys that its topology has otherwise.
        count: Of replicas or the example's instances.
        tuned: Plain vLLM has the executor and threads of ``epd-launch``, on a CPU.
    """

    name: str
    kind: Literal["topology", "replicas", "upstream", "url"]
    what: str
    file: Path | None = None
    settings: tuple[str, ...] = ()
    count: int = 0
    urls: tuple[str, ...] = ()
    tuned: bool = False

    @property
    def plain(self) -> bool:
        """Return whether it is vLLM without this package."""
        return self.kind in ("replicas", "upstream")


def read_side(text: str) -> LoadSide:
    """Read one ``--side``; `ConfigError` if it is invalid."""
    named = re.match(r"([\w.-]+)=", text)
    name, what = (named[1], text[named.end() :]) if named else ("", text)
    plain = r"(?:replicas:([1-9]\d*)|upstream:1E1PD)(,tuned)?((?:,[\w.]+=[^,]+)*)"
    if found := re.fullmatch(plain, what, re.I):
        kind: Literal["replicas", "upstream"] = "replicas" if found[1] else "upstream"
        return LoadSide(
            name=name or ("tuned-" if found[2] else "") + ("one" if found[1] == "1" else kind),
            kind=kind,
            what=what,
            settings=tuple(found[3].split(",")[1:]),
            count=int(found[1] or 2),
            tuned=bool(found[2]),
        )
    urls = tuple(url.rstrip("/").removesuffix("/v1") for url in what[4:].split(","))
    if what.startswith("url:") and all(re.fullmatch(r"http://[^/]+", url) for url in urls):
        return LoadSide(name=name or "url", kind="url", what=what, urls=urls)
    file, *changed = what.split(",")
    if file.endswith((".yaml", ".yml")) and all("=" in each for each in changed):
        return LoadSide(
            name=name or "ours", kind="topology", what=what, file=Path(file), settings=(*changed,)
        )
    raise ConfigError(f"--side {text}: expected NAME=WHAT, for example {EXAMPLES}")


def read_sides(texts: Sequence[str]) -> tuple[LoadSide, ...]:
    """Read all sides; `ConfigError` if one is invalid, or two have one name."""
    found = tuple(map(read_side, texts))
    names = [side.name for side in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--side: two are called {twice[0]}; write NAME=WHAT with other names")
    return found


def instance_count(side: LoadSide, topology: Topology | None) -> int:
    """Return the ranks of a side's instances, a listed device once; 0 for running servers."""
    if topology is None or side.kind != "topology":
        return side.count
    groups = [getattr(topology.instances, name) for name in Instances.model_fields]
    listed = {device for group in groups for device in group.devices or ()}
    return len(listed) + sum(ranks_of(group) for group in groups if not group.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """Cores or devices of each side.

    Attributes:
        units: Of each instance of each side, in the order of the instances.
        rest: Cores of the clients, the front end and the proxy.
        binds_cores: Each instance is bound to cores of its own: no devices, and cores enough.
    """

    units: dict[str, list[tuple[str, ...]]]
    rest: tuple[int, ...]
    binds_cores: bool

    def __str__(self) -> str:
        """Return the cores or devices of each side, as a sentence."""
        parts = "; ".join(
            f"{name}: " + ", ".join("+".join(units) for units in instances)
            for name, instances in self.units.items()
        )
        return (
            f"Cores or devices of each instance: {parts or 'unknown'}; cores of clients and front "
            f"end: {', '.join(map(str, self.rest))}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSetting:
    """A whole measurement, before its results.

    Attributes:
        topologies: Of each side; of plain vLLM the one whose arguments it gets.
        settings: Keys that all topologies have otherwise, the model among them.
        folder: For logs, in a folder for each side.
    """

    sides: tuple[LoadSide, ...]
    platform: PlatformName
    topologies: dict[str, Topology]
    settings: tuple[str, ...]
    allotment: Allotment
    folder: Path
    upstream_proxy: Path | None


def share_out(
    counts: Mapping[str, int], *, cores: Sequence[int], devices: Sequence[str] | None
) -> Allotment:
    """Give every side the same cores or devices, and divide them among its instances.

    A side has one for each instance of the largest side; fewer cores are shared by all instances.

    Raises:
        ConfigError: They cannot be divided equally, or there are too few devices.
    """
    supply = list(map(str, cores)) if devices is None else list(devices)
    started = {name: count for name, count in counts.items() if count}
    total = max(started.values(), default=0)
    if total > len(supply) and devices is None:
        shared = {name: [tuple(supply)] * count for name, count in started.items()}
        return Allotment(units=shared, rest=tuple(cores), binds_cores=False)
    if total > len(supply):
        raise ConfigError(f"--side: {total} devices are needed, of {len(supply)}; use fewer")
    taken = supply[len(supply) - total :]
    units = {}
    for name, count in started.items():
        each, left = divmod(total, count)
        if left:
            raise ConfigError(
                f"--side {name}: {total} cores or devices cannot be divided equally among the "
                f"{count} instances; give all sides the same number of instances"
            )
        units[name] = [tuple(taken[at * each : (at + 1) * each]) for at in range(count)]
    rest = tuple(core for core in cores if devices is not None or str(core) not in taken)
    return Allotment(units=units, rest=rest or tuple(cores), binds_cores=devices is None)
