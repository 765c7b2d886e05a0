"""The topology files and hardware profiles that come with the package."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "configs"
"""The folder ``configs`` of the repository, also in an installed package."""


def or_shipped(path: Path) -> Path:
    """Return a file, or the one of the package that is meant where there is no such file.

    Args:
        path: As a user wrote it; ``configs/1e1pd.yaml`` and ``1e1pd.yaml`` mean one of the package.
    """
    if path.exists() or path.is_absolute():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    found = SHIPPED.joinpath(*parts)
    return found if ".." not in parts and found.is_file() else path
