"""Who is measured, and which cores or devices everybody gets: the same for every side. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from epd_portable.config.groups import Instances
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.placement import ranks_of

SideKind = Literal["topology", "replicas", "ranks", "upstream", "url"]
EXAMPLES = "ours=configs/1e1pd.yaml, replicas:2, upstream:1E1PD, there=url:http://127.0.0.1:8000"

_PLAIN = re.compile(r"(replicas|dp):(\d+)")
_UPSTREAM = re.compile(r"upstream:(\d+)E(\d+)PD", re.IGNORECASE)
_TUNED = ",tuned"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSide:
    """Somebody who is measured.

    Attributes:
        name: In tables.
        kind: ``topology``, started by ``epd-launch``; ``replicas``, plain vLLM, so many servers;
            ``ranks``, one server of plain vLLM with so many ranks of data parallelism;
            ``upstream``, vLLM's example of an encode and a prefill+decode instance; ``url``,
            servers that run already.
        what: As it was written, without the name.
        file: Of a topology.
        settings: Keys that this topology has otherwise, as ``--set`` takes them.
        count: Of replicas or ranks.
        urls: Base addresses of running servers.
        tuned: Of plain vLLM, see `epd_portable.bench.load.peers`.
    """

    name: str
    kind: SideKind
    what: str
    file: Path | None = None
    settings: tuple[str, ...] = ()
    count: int = 0
    urls: tuple[str, ...] = ()
    tuned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """Who gets what.

    Attributes:
        units: Cores or devices of each instance of each side, in the order of the instances.
        total: Cores or devices of a whole side.
        rest: Cores of what is no instance: the clients, the router, the proxy.
        shared: Whether these are cores of instances too, because none is left.
        crowded: Whether all instances of a side share all cores.
    """

    units: dict[str, list[tuple[str, ...]]]
    total: int
    rest: tuple[int, ...]
    shared: bool
    crowded: bool = False


def read_side(text: str) -> LoadSide:
    """Read one ``--side``.

    Raises:
        ConfigError: It is none.
    """
    named = re.match(r"([\w.-]+)=", text)
    name, what = (named[1], text[named.end() :]) if named else ("", text)
    plain, tuned = what.removesuffix(_TUNED), what.endswith(_TUNED)
    prefix = "tuned-" if tuned else ""
    if found := _PLAIN.fullmatch(plain):
        count = int(found[2])
        if not count:
            raise ConfigError(f"--side {text}: at least one")
        kind: SideKind = "replicas" if found[1] == "replicas" else "ranks"
        usual = "one" if count == 1 else found[1]
        return LoadSide(name=name or prefix + usual, kind=kind, what=what, count=count, tuned=tuned)
    if found := _UPSTREAM.fullmatch(plain):
        if found.groups() != ("1", "1"):
            raise ConfigError(
                f"--side {text}: vLLM's example is measured with one instance of each role; write "
                "upstream:1E1PD"
            )
        return LoadSide(name=name or prefix + "upstream", kind="upstream", what=what, tuned=tuned)
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
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--side: two are called {twice[0]}; write NAME=WHAT with other names")
    return found


def with_proxy(sides: Sequence[LoadSide], *, real: bool) -> tuple[LoadSide, ...]:
    """Return the sides under names that say whether vLLM's example has its own proxy."""
    if real:
        return tuple(sides)
    return tuple(
        replace(side, name=f"{side.name}-stand-in") if side.kind == "upstream" else side
        for side in sides
    )


def instance_count(side: LoadSide, topology: Topology | None) -> int:
    """Return how many ranks_of a side has: ranks of instances; none for servers that run already.

    A device that a topology lists for several ranks is one seat.
    """
    if side.kind != "topology":
        return {"replicas": side.count, "ranks": side.count, "upstream": 2, "url": 0}[side.kind]
    assert topology is not None
    groups = [getattr(topology.instances, name) for name in Instances.model_fields]
    listed = {device for group in groups for device in group.devices or ()}
    return len(listed) + sum(ranks_of(group) for group in groups if not group.devices)


def share_out(
    counts: Mapping[str, int],
    *,
    cores: Sequence[int],
    devices: Sequence[str] | None,
    wanted: int | None,
    crowded: bool = False,
) -> Allotment:
    """Give every side the same cores or devices, and divide them among its instances.

    Args:
        counts: Seats of each side, see `instance_count`.
        cores: That this process may use.
        devices: Those of the platform; ``None`` where instances are bound to cores.
        wanted: Cores or devices of a side; by default one for each seat of the largest.
        crowded: All instances of a side share all cores.

    Raises:
        ConfigError: They cannot be divided equally, or there are too few.
    """
    if crowded:
        everything = tuple(map(str, cores))
        return Allotment(
            units={name: [everything] * count for name, count in counts.items() if count},
            total=len(cores),
            rest=tuple(cores),
            shared=True,
            crowded=True,
        )
    supply = list(map(str, cores)) if devices is None else list(devices)
    noun = "cores" if devices is None else "devices"
    started = {name: count for name, count in counts.items() if count}
    total = wanted or max(started.values(), default=0)
    if total > len(supply):
        raise ConfigError(
            f"a side wants {total} {noun} and there are {len(supply)}: use fewer instances"
        )
    for name, count in started.items():
        if total % count:
            raise ConfigError(
                f"{total} {noun} cannot be divided equally among the {count} instances of {name}: "
                "every side gets the same; give all the same number of instances, or a --units "
                "that they divide"
            )
    taken = supply[len(supply) - total :]
    units = {
        name: [
            tuple(taken[seat * total // count : (seat + 1) * total // count])
            for seat in range(count)
        ]
        for name, count in started.items()
    }
    rest = [core for core in cores if str(core) not in taken] if devices is None else list(cores)
    return Allotment(
        units=units, total=total, rest=tuple(rest or cores), shared=not rest and bool(total)
    )


def api_cores(side: LoadSide, server: int, allotment: Allotment) -> frozenset[int]:
    """Return where the API server of plain vLLM may run beside its engine's cores.

    Of tuned sides where the launcher lets those of its instances: on cores that no rank has, and,
    unless it encodes only, on the encoder's.

    Args:
        side: Replicas, ranks or vLLM's example.
        server: Its number; the example's first encodes.
        allotment: Who gets which cores.
    """
    if not side.tuned:
        return frozenset()
    cores = [] if allotment.shared else list(allotment.rest)
    if side.kind == "upstream" and server > 0:
        cores += map(int, allotment.units[side.name][0])
    return frozenset(cores)
