"""From a topology file, a platform and overrides to one checked ``Topology``.

Every problem of a file is reported at once, under the key and line where the user wrote it. The
overlays of platforms that were not chosen are checked as well, so that a file that loads on one
platform loads on all.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from epd_portable.config.document import Document, KeyPath, read_override, read_yaml
from epd_portable.config.instance import PlatformName
from epd_portable.config.problems import all_problems, explain, read_text
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError

PLATFORMS: tuple[PlatformName, ...] = typing.get_args(PlatformName)
OVERLAYS = "platform"
MISSING: dict[KeyPath, str] = {("model",): "; give a Hugging Face id, a folder or 'demo'"}
NOT_SUPPORTED: dict[KeyPath, str] = {
    ("instances", role): "splitting prefill from decode is not supported yet by this version; "
    "use instances.prefill_decode"
    for role in ("prefill", "decode")
}


def load_topology(path: Path, platform: PlatformName, *, overrides: Sequence[str] = ()) -> Topology:
    """Read a topology file for one platform.

    Args:
        path: YAML file.
        platform: Whose overlay is laid over the file.
        overrides: ``key.subkey=value`` assignments, laid over everything in their order.

    Raises:
        ConfigError: The file cannot be read, or it lists every problem of its content.
    """
    return parse_topology(read_text(path), platform, overrides=overrides, source=str(path))


def parse_topology(
    text: str,
    platform: PlatformName,
    *,
    overrides: Sequence[str] = (),
    source: str = "configuration",
) -> Topology:
    """Check the text of a topology file; see ``load_topology``."""
    try:
        document = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    overlays, problems = _split_overlays(document)
    changes = [read_override(assignment) for assignment in overrides]
    topology: Topology | None = None
    for name in dict.fromkeys([platform, *overlays]):
        merged = document.overlaid(overlays.get(name, Document()))
        for change in changes:
            merged = merged.overlaid(change)
        try:
            candidate = Topology.model_validate(merged.data)
        except ValidationError as error:
            problems += explain(
                error,
                merged,
                Topology,
                more_keys=(OVERLAYS,),
                missing=MISSING,
                refused=NOT_SUPPORTED,
            )
            continue
        if name == platform:
            topology = candidate
    if problems or topology is None:
        raise all_problems(source, problems)
    return topology


def _split_overlays(document: Document) -> tuple[dict[PlatformName, Document], list[str]]:
    """Take the overlays out of ``document``; return them and what is wrong with their names."""
    overlays: dict[PlatformName, Document] = {}
    problems: list[str] = []
    section = document.data.get(OVERLAYS, {})
    if not isinstance(section, dict):
        problems.append(f"{OVERLAYS}: expected a mapping of {', '.join(PLATFORMS)}")
        section = {}
    for name, content in section.items():
        place = document.places[(OVERLAYS, name)]
        if name not in PLATFORMS:
            problems.append(
                f"{place.key} ({place.where}): unknown platform; known are {', '.join(PLATFORMS)}"
            )
        elif not isinstance(content, dict):
            problems.append(f"{place.key} ({place.where}): expected a mapping of top-level keys")
        else:
            overlays[name] = document.take(OVERLAYS, name)
    document.data.pop(OVERLAYS, None)
    return overlays, problems
