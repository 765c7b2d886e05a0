"""From a topology file, a platform and overrides to one checked ``Topology``.

Every problem of a file is reported at once, under the key and line where the user wrote it. The
overlays of platforms that were not chosen are checked as well, so that a file that loads on one
platform loads on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epd_portable.config.choice import with_file
from epd_portable.config.document import KeyPath, overlaid, read_override, read_yaml
from epd_portable.config.instance import PLATFORMS
from epd_portable.config.problems import (
    all_problems,
    by_line,
    named_key,
    read_text,
    validated,
    with_place,
)
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[1] / "configs"
"""The folder ``configs`` of the repository, also in an installed package."""
OVERLAYS = "platform"
MISSING: dict[KeyPath, str] = {("model",): "; give a Hugging Face id, a folder or 'demo'"}

Check = Callable[[Mapping[str, Any]], Iterable[tuple[KeyPath, str]]]
"""Takes the content of a file for the chosen platform, unchecked; returns keys with their
problems."""


def load_topology(
    path: Path,
    platform: str,
    *,
    overrides: Sequence[str] = (),
    checks: Sequence[Check] = (),
) -> Topology:
    """Read a topology file for one platform.

    Args:
        path: YAML file; one of the package where there is no such file, see `or_shipped`.
        platform: Its overlay is laid over the file.
        overrides: ``key.subkey=value`` assignments, laid over everything in their order.

    Raises:
        ConfigError: The file, or one that it names, cannot be read, or it lists every problem of
            its content.
    """
    topology = parse_topology(
        read_text(or_shipped(path)), platform, overrides=overrides, source=str(path), checks=checks
    )
    if topology.front.choice is None:
        return topology
    front = topology.front.model_copy(update={"choice": with_file(topology.front.choice)})
    return topology.model_copy(update={"front": front})


def parse_topology(
    text: str,
    platform: str,
    *,
    overrides: Sequence[str] = (),
    source: str = "configuration",
    checks: Sequence[Check] = (),
) -> Topology:
    """Check the text of a topology file; see ``load_topology``."""
    data, problems = read_yaml(text, source)
    overlays = _split_overlays(data, problems)
    changes = [change for each in overrides if (change := _read_change(each, problems))]
    topology: Topology | None = None
    for name in dict.fromkeys([platform, *overlays]):
        whole = functools.reduce(overlaid, [overlays.get(name, {}), *changes], data)
        if name == platform:
            for check in checks:
                problems += [f"{named_key(whole, path)}: {said}" for path, said in check(whole)]
        made, found = validated(whole, Topology, more_keys=(OVERLAYS,), missing=MISSING)
        problems += found
        if name == platform:
            topology = made
    if problems or topology is None:
        raise all_problems(source, by_line(problems))
    return topology


def or_shipped(path: Path) -> Path:
    """Return a file, or the one of the package that is meant where there is no such file.

    Args:
        path: As a user wrote it; ``configs/1e1pd.yaml`` and ``1e1pd.yaml`` mean one of the package.

    Raises:
        ConfigError: There is neither.
    """
    if path.exists():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    found = SHIPPED.joinpath(*parts)
    if not path.is_absolute() and ".." not in parts and found.is_file():
        return found
    names = ", ".join(sorted(each.name for each in SHIPPED.glob("*.yaml")))
    raise ConfigError(
        f"configuration file {path}: no such file; the package has {names}. Give one of them, or "
        "the path of a file"
    )


def located(
    error: ConfigError, path: Path, platform: str, *, overrides: Sequence[str] = ()
) -> ConfigError:
    """Add to an error about a file of `load_topology` the place of the key that it names."""
    data, problems = read_yaml(read_text(or_shipped(path)), str(path))
    overlay = _split_overlays(data, problems).get(platform, {})
    whole = functools.reduce(overlaid, [overlay, *map(read_override, overrides)], data)
    said = with_place(str(error), whole)
    return error if said == str(error) else ConfigError(f"{path}: {said}")


def _read_change(assignment: str, problems: list[str]) -> dict[str, Any] | None:
    """Read a ``--set``; add what is wrong with it to ``problems``."""
    try:
        change = read_override(assignment)
    except ConfigError as error:
        problems.append(str(error))
        return None
    if OVERLAYS in change:
        problems.append(
            f"--set {assignment}: overlays of platforms cannot be set so; --set is laid over the "
            f"overlay of the chosen platform: leave out {OVERLAYS}.NAME"
        )
        return None
    return change


def _split_overlays(data: dict[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Take the overlays out of ``data``; add what is wrong with their names to ``problems``."""
    overlays: dict[str, dict[str, Any]] = {}
    section = data.get(OVERLAYS, {})
    if not isinstance(section, dict):
        problems.append(f"{OVERLAYS}: expected a mapping of {', '.join(PLATFORMS)}")
        section = {}
    for name, content in section.items():
        key = named_key(data, (OVERLAYS, name))
        # All names are queried only where one is not built in.
        if name not in PLATFORMS:
            problems.append(f"{key}: unknown platform; known are {', '.join(PLATFORMS)}")
        elif not isinstance(content, dict):
            problems.append(f"{key}: expected a mapping of top-level keys")
        else:
            overlays[name] = content
    data.pop(OVERLAYS, None)
    return overlays
