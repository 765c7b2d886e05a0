"""What installed packages add by entry point: transfer paths and platforms.

Names are read from the packages' metadata, and only when a name is not built in, or when all are
listed. A package is imported when what it adds is first used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from epd_portable.errors import ConfigError

T = TypeVar("T")

PATHS_GROUP = "epd_portable.transfer_paths"
"""Entry points of this group are transfer paths: name = a `PathEntry` of that name."""

PLATFORMS_GROUP = "epd_portable.platforms"
"""Entry points of this group are platforms: name = a `PlatformTraits` of that name."""

AUTO = "auto"

BUILT_IN_PATHS = ("ipc", "shm", "nixl", "mooncake", "collective", "tcp")
"""Transfer paths of this package; `epd_portable.connector.registry` says what they are."""


@functools.cache
def installed(group: str) -> Mapping[str, metadata.EntryPoint]:
    """Return the entry points of a group by name; read once in a process."""
    return MappingProxyType({each.name: each for each in metadata.entry_points(group=group)})


def load(group: str, name: str, kind: type[T]) -> T:
    """Return the object of an entry point, which must be of a kind and have the same name.

    Raises:
        ConfigError: Its package does not load, or names something else.
    """
    point = installed(group)[name]
    try:
        found = point.load()
    except Exception as error:  # Whatever the package raises.
        raise ConfigError(
            f"{name!r} of {group} ({point.value}) cannot be loaded: {error!r}; repair or remove "
            "the package that registers it"
        ) from error
    if not isinstance(found, kind) or getattr(found, "name", None) != name:
        raise ConfigError(
            f"{name!r} of {group} ({point.value}) is {type(found).__name__} "
            f"{getattr(found, 'name', '')!r}, expected a {kind.__name__} of the same name"
        )
    return found


def known(name: str, built_in: tuple[str, ...], group: str, *, what: str) -> str:
    """Return a name that is built in or registered by an installed package.

    Raises:
        ValueError: It is neither; the known ones are listed.
    """
    if name in built_in or name in installed(group):
        return name
    known_ones = ", ".join(names(built_in, group))
    raise ValueError(f"unknown {what} {name[:64]!r}; known are {known_ones}")


def names(built_in: tuple[str, ...], group: str) -> tuple[str, ...]:
    """Return the built-in names, and those that installed packages register."""
    return (*built_in, *sorted(set(installed(group)) - set(built_in)))


def _path(name: str) -> str:
    return known(name, (AUTO, *BUILT_IN_PATHS), PATHS_GROUP, what="transfer path")


PathName = Annotated[str, AfterValidator(_path)]
"""``auto``, a transfer path of this package, or one of an installed package."""
