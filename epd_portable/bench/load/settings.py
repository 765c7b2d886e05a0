"""From the command line's options to a plan and its ground."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from epd_portable.bench.load import checkpoint
from epd_portable.bench.load.plan import LoadPoint, SearchRange
from epd_portable.bench.load.requests import Mix
from epd_portable.bench.load.sides import Allotment, LoadSide, instance_count, share_out
from epd_portable.config.instance import PlatformName
from epd_portable.config.load import load_topology, parse_topology
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.file_checks import usual_checks
from epd_portable.launch.plan.machine import allowed_cores, assumed_machine
from epd_portable.platforms.traits import TRAITS

INSTANCE_BYTES = 9 << 28
"""Memory for an instance on the CPU with a small model: 2.25 GiB. Seen: 1.1 GiB of one that
encodes, 2.5 GiB of others, with one GiB of KV cache."""

PRESETS: dict[str, dict[str, Any]] = {
    "random-mm": {
        "share": 1.0,
        "pictures": "1,2,4,8",
        "size": "448",
        "text": 400,
        "output": 150,
    },
    "one-by-one": {"concurrency": (1,), "share": 0.5, "requests": 40, "stages": True},
}
"""Values of options by preset; what is given on the command line goes before them."""

_PLAIN = """
model: demo
engine_args: {max_model_len: 4096, limit_mm_per_prompt: {video: 0}}
platform:
  cpu:
    engine_args: {dtype: bfloat16, enforce_eager: true}
    env: {VLLM_CPU_KVCACHE_SPACE: "1"}
"""
"""What plain vLLM gets where no topology is measured beside it."""


def read_numbers(text: str, option: str, kind: type[Any]) -> tuple[Any, ...]:
    """Read numbers separated by commas, all positive.

    Raises:
        ConfigError: One is none.
    """
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected numbers, as in 1,2,4") from error
    if min(found) <= 0:
        raise ConfigError(f"{option} {text}: every number must be positive")
    return found


def read_range(text: str, precision: float) -> SearchRange:
    """Read ``LOW:HIGH``.

    Raises:
        ConfigError: It is no range.
    """
    low, _, high = text.partition(":")
    try:
        found = SearchRange(low=float(low), high=float(high), precision=precision)
    except ValueError as error:
        raise ConfigError(f"--goodput {text}: expected LOW:HIGH, as in 0.5:16") from error
    if not 0 < found.low < found.high:
        raise ConfigError(f"--goodput {text}: the first must be positive and below the second")
    return found


_POINT_KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "rate": lambda text: {"rate": float(text), "concurrency": 0},
    "concurrency": lambda text: {"concurrency": int(text), "rate": 0.0},
    "cv": lambda text: {"cv": float(text)},
}
_MIX_KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "share": lambda text: {"share": float(text)},
    "pictures": lambda text: {"pictures": tuple(map(int, text.split("/")))},
    "size": lambda text: {"sizes": tuple(map(int, text.split("/")))},
    "text": lambda text: {"text_tokens": int(text)},
    "output": lambda text: {"output_tokens": int(text)},
    "repeat": lambda text: {"repeat": float(text)},
    "turns": lambda text: {"turns": int(text)},
}


def read_point(text: str, usual: LoadPoint) -> LoadPoint:
    """Read ``KEY=VALUE,...``, which differs from the usual point in these keys.

    Raises:
        ConfigError: A key or value is none.
    """
    point = usual
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            if key in _POINT_KEYS:
                point = dataclasses.replace(point, **_POINT_KEYS[key](value))
            else:
                mix = dataclasses.replace(point.mix, **_MIX_KEYS[key](value))
                point = dataclasses.replace(point, mix=mix)
        except KeyError as error:
            known = ", ".join((*_POINT_KEYS, *_MIX_KEYS))
            raise ConfigError(f"--point {text}: {key!r} is none of {known}") from error
        except ValueError as error:
            raise ConfigError(f"--point {text}: {value!r} is no value of {key}") from error
    return point


def check_points(points: Sequence[LoadPoint], *, sought: bool) -> None:
    """Check that every point can be asked, and that no two are the same.

    Raises:
        ConfigError: Not so.
    """
    keys = [point.key for point in points]
    for point in points:
        mix = point.mix
        if keys.count(point.key) > 1:
            raise ConfigError(f"the point {point.key} is there twice")
        if not (point.rate > 0 or point.concurrency > 0 or point.replay or sought):
            raise ConfigError(
                "nothing says how often to ask: give --rate, --concurrency, --goodput or --replay"
            )
        if not (0 <= mix.share <= 1 and 0 <= mix.repeat <= 1 and 0 <= point.cv <= 20):
            raise ConfigError(f"{point.key}: shares are 0 to 1, a CV is 0 to 20")
        if min(*mix.pictures, mix.text_tokens, mix.turns) < 1 or mix.output_tokens < 2:
            raise ConfigError(
                f"{point.key}: pictures, tokens and turns are 1 or more, of an answer 2"
            )
        if min(mix.sizes) < 28 or max(mix.sizes) > 4096:
            raise ConfigError(f"{point.key}: sides of pictures are 28 to 4096 pixels")


def usual_point(
    *,
    share: float,
    pictures: str,
    size: str,
    text: int,
    output: int,
    repeat: float,
    turns: int,
    format: Any,
    cv: float,
) -> LoadPoint:
    """Return what a point is where ``--point`` says nothing else."""
    mix = Mix(
        share=share,
        pictures=read_numbers(pictures, "--pictures", int),
        sizes=read_numbers(size, "--size", int),
        text_tokens=text,
        output_tokens=output,
        repeat=repeat,
        turns=turns,
        format=format,
    )
    return LoadPoint(mix=mix, cv=cv)


@dataclass(frozen=True, kw_only=True, slots=True)
class SidesAsked:
    """What the command line says of the sides.

    Attributes:
        sides: Whom to measure.
        platform: What everything runs on.
        settings: As ``--set`` takes them.
        model: Replaces that of the topology files; ``None`` keeps it.
        units: Cores or devices of a side; ``None`` for one for each instance.
        crowded: Instances share all cores, for what is counted and not timed.
    """

    sides: tuple[LoadSide, ...]
    platform: PlatformName
    settings: tuple[str, ...]
    model: str | None
    units: int | None
    crowded: bool = False


def find_model(
    model: str | None, shape: str, report: Callable[[str], None], *, make: bool
) -> str | None:
    """Return the folder or name of the model; ``None`` keeps that of the topology files.

    Args:
        model: As on the command line.
        shape: Size of the one that is made for the measurement.
        report: Gets a line if that takes time.
        make: Make it; otherwise it is only named.
    """
    if model != checkpoint.MODEL:
        return model
    wanted = checkpoint.read_shape(shape)
    return str(checkpoint.cached_checkpoint(wanted, report)) if make else wanted.folder_name


def topologies(asked: SidesAsked) -> dict[str, Topology]:
    """Return the topology of each side; plain vLLM takes the arguments of the first.

    Raises:
        ConfigError: A file or setting is wrong.
    """
    found: dict[str, Topology] = {}
    for side in asked.sides:
        if side.file is not None:
            loaded = load_topology(
                side.file,
                asked.platform,
                overrides=(*asked.settings, *side.settings),
                checks=usual_checks(TRAITS[asked.platform]),
            )
            found[side.name] = _with_model(loaded, asked.model)
    first = next(iter(found.values()), None)
    if first is None:
        plain = parse_topology(
            _PLAIN,
            asked.platform,
            overrides=asked.settings,
            checks=usual_checks(TRAITS[asked.platform]),
        )
        first = _with_model(plain, asked.model)
    return {side.name: found.get(side.name, first) for side in asked.sides}


def allot(asked: SidesAsked, found: dict[str, Topology]) -> Allotment:
    """Give every side the same cores or devices.

    Raises:
        ConfigError: They cannot be divided, or there are too few.
    """
    counts = {side.name: instance_count(side, found[side.name]) for side in asked.sides}
    traits = TRAITS[asked.platform]
    devices = None
    if traits.visible_devices_env is not None:
        machine = assumed_machine(traits, os.environ)
        most = asked.units or max(counts.values())
        devices = machine.devices or tuple(map(str, range(most)))
    if asked.crowded and devices is not None:
        raise ConfigError("--crowded is for instances on cores: they share no devices here")
    return share_out(
        counts,
        cores=allowed_cores(),
        devices=devices,
        wanted=asked.units,
        crowded=asked.crowded,
    )


def equal_words(asked: SidesAsked, allotment: Allotment) -> str:
    """Say who gets what."""
    if not allotment.units:
        return "All sides ran already; who has which cores is not known here."
    if allotment.crowded:
        return (
            f"All instances of a side, clients and router share {allotment.total} cores: what is "
            "counted can be compared, times cannot."
        )
    noun = "device" if TRAITS[asked.platform].visible_devices_env is not None else "core"
    parts = [
        f"{name}: " + ", ".join("+".join(units) for units in instances)
        for name, instances in allotment.units.items()
    ]
    text = f"Every side has the same {allotment.total} {noun}s ({noun} of each instance – "
    text += f"{'; '.join(parts)})"
    if noun == "device":
        return f"{text}."
    rest = ", ".join(map(str, allotment.rest))
    if allotment.shared:
        return f"{text}; clients, router and proxy share them, because no other is there."
    return f"{text}; clients, router and proxy have {rest}."


def fits_together(asked: SidesAsked, allotment: Allotment) -> bool:
    """Return whether all sides can be up at the same time."""
    if TRAITS[asked.platform].visible_devices_env is not None:
        # Devices would be shared, and nobody knows how much memory each may take.
        return len(allotment.units) < 2
    engines = sum(len(instances) for instances in allotment.units.values())
    return psutil.virtual_memory().available >= engines * INSTANCE_BYTES


def _with_model(topology: Topology, model: str | None) -> Topology:
    return topology if model is None else topology.model_copy(update={"model": model})
