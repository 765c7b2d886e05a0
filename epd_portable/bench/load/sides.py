"""Which sides are measured, and which cores or devices each gets: the same for all. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from epd_portable.config.groups import Instances
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import ranks_of

SideKind = Literal["topology", "replicas", "upstream", "url"]
EXAMPLES = "ours=configs/1e1pd.yaml, replicas:2, upstream:1E1PD, there=url:http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSide:
    """A side of a measurement.

    Attributes:
        name: In tables.
        kind: ``topology``, started by ``epd-launch``; ``replicas``, so many servers of plain vLLM;
            ``upstream``, vLLM's example of an encode and a prefill+decode instance; ``url``,
            servers that run already.
        what: As it was written, without the name.
        file: Of a topology.
        settings: Keys that its topology has otherwise, as ``--set`` takes them; plain vLLM gets
            the arguments of a topology with these.
        count: Of replicas or the example's instances.
        urls: Base addresses of running servers.
        tuned: Of plain vLLM, see `epd_portable.bench.load.servers`.
    """

    name: str
    kind: SideKind
    what: str
    file: Path | None = None
    settings: tuple[str, ...] = ()
    count: int = 0
    urls: tuple[str, ...] = ()
    tuned: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is vLLM without this package."""
        return self.kind in ("replicas", "upstream")


def read_side(text: str) -> LoadSide:
    """Read one ``--side``.

    Raises:
        ConfigError: It is none.
    """
    named = re.match(r"([\w.-]+)=", text)
    name, what = (named[1], text[named.end() :]) if named else ("", text)
    plain = r"(?:replicas:([1-9]\d*)|upstream:1E1PD)(,tuned)?((?:,[\w.]+=[^,]+)*)"
    if found := re.fullmatch(plain, what, re.I):
        kind: SideKind = "replicas" if found[1] else "upstream"
        usual = "one" if found[1] == "1" else kind
        return LoadSide(
            name=name or ("tuned-" if found[2] else "") + usual,
            kind=kind,
            what=what,
            settings=tuple(found[3].split(",")[1:]),
            count=int(found[1] or 2),
            tuned=bool(found[2]),
        )
    if what.startswith("url:"):
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in what[4:].split(","))
        for url in urls:
            if not re.fullmatch(r"http://[^/]+", url):
                raise ConfigError(f"--side {text}: {url!r} is no address like http://host:port")
        return LoadSide(name=name or "url", kind="url", what=what, urls=urls)
    file, *changed = what.split(",")
    if file.endswith((".yaml", ".yml")) and all("=" in each for each in changed):
        return LoadSide(
            name=name or "ours",
            kind="topology",
            what=what,
            file=Path(file),
            settings=tuple(changed),
        )
    raise ConfigError(f"--side {text}: expected NAME=WHAT, for example {EXAMPLES}")


def read_sides(texts: Sequence[str]) -> tuple[LoadSide, ...]:
    """Read all sides.

    Raises:
        ConfigError: One is none, or two have one name.
    """
    found = tuple(map(read_side, texts))
    names = [side.name for side in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--side: two are called {name}; write NAME=WHAT with other names")
    return found


def instance_count(side: LoadSide, topology: Topology | None) -> int:
    """Return how many ranks of instances a side has; 0 for servers that run already.

    A device that a topology lists for several ranks counts once.
    """
    if side.kind != "topology":
        return side.count
    assert topology is not None
    groups = [getattr(topology.instances, name) for name in Instances.model_fields]
    listed = {device for group in groups for device in group.devices or ()}
    return len(listed) + sum(ranks_of(group) for group in groups if not group.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """Which cores or devices each side gets.

    Attributes:
        units: Cores or devices of each instance of each side, in the order of the instances.
        rest: Cores of the clients, the router and the proxy.
        devices: The units are devices.
        shared: The clients' cores are those of instances too, because no other is left.
        crowded: There are fewer cores than instances, which share all of them.
    """

    units: dict[str, list[tuple[str, ...]]]
    rest: tuple[int, ...]
    devices: bool = False
    shared: bool = False
    crowded: bool = False

    @property
    def binds_cores(self) -> bool:
        """Whether each instance is bound to cores of its own."""
        return not (self.devices or self.crowded)

    def __str__(self) -> str:
        """Say which cores or devices each side has."""
        if not self.units:
            return "All sides ran already; which cores each has is not known here."
        if self.crowded:
            return "Every side has all cores, which its instances, clients and router share."
        noun = "device" if self.devices else "core"
        parts = "; ".join(
            f"{name}: " + ", ".join("+".join(units) for units in instances)
            for name, instances in self.units.items()
        )
        total = sum(map(len, next(iter(self.units.values()))))
        text = f"Every side has the same {total} {noun}s ({noun} of each instance – {parts})"
        if self.devices:
            return f"{text}."
        if self.shared:
            return f"{text}; clients, router and proxy share them, because no other is there."
        return f"{text}; clients, router and proxy have {', '.join(map(str, self.rest))}."


def share_out(
    counts: Mapping[str, int], *, cores: Sequence[int], devices: Sequence[str] | None
) -> Allotment:
    """Give every side the same cores or devices, and divide them among its instances.

    A side has one for each instance of the largest side; where there are fewer cores, all
    instances share all of them.

    Args:
        counts: Ranks of each side, see `instance_count`.
        cores: Those that this process may use.
        devices: Those of the platform; ``None`` where instances are bound to cores.

    Raises:
        ConfigError: They cannot be divided equally, or there are too few devices.
    """
    supply = list(map(str, cores)) if devices is None else list(devices)
    started = {name: count for name, count in counts.items() if count}
    total = max(started.values(), default=0)
    noun = "cores" if devices is None else "devices"
    if total > len(supply) and devices is None:
        units = {name: [tuple(supply)] * count for name, count in started.items()}
        return Allotment(units=units, rest=tuple(cores), shared=True, crowded=True)
    if total > len(supply):
        raise ConfigError(
            f"a side wants {total} {noun} and there are {len(supply)}: use fewer instances"
        )
    taken = supply[len(supply) - total :]
    units = {}
    for name, count in started.items():
        each, left = divmod(total, count)
        if left:
            raise ConfigError(
                f"{total} {noun} cannot be divided equally among the {count} instances of {name}: "
                "every side gets the same; give all the same number of instances"
            )
        units[name] = [tuple(taken[at * each : (at + 1) * each]) for at in range(count)]
    if devices is not None:
        return Allotment(units=units, rest=tuple(cores), devices=True)
    rest = tuple(core for core in cores if str(core) not in taken)
    return Allotment(units=units, rest=rest or tuple(cores), shared=not rest)


def api_cores(side: LoadSide, server: int, allotment: Allotment) -> frozenset[int]:
    """Return where an API server of a tuned side may run besides its engine's cores.

    As the launcher lets those of its instances: on cores that no rank has, and, unless it encodes
    only, as the example's first server, on the encoder's.
    """
    cores = [] if allotment.shared else list(allotment.rest)
    if side.kind == "upstream" and server > 0:
        cores += map(int, allotment.units[side.name][0])
    return frozenset(cores)
