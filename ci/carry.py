"""Carries wheels to a machine without a network, in pieces of a size that reaches it.

Where there is a network: ``python -m ci.carry FOLDER --have image.txt``, with what ``pip freeze``
says on that machine. Each piece has a folder of its own with the list of all wheels. There the
pieces are taken in whatever order; wheels are installed as soon as they are whole, the engine's,
by far the largest, last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "vllm==0.26.0"
"""The release that is built for torch 2.11."""
TORCH = ("torch", "torchvision", "torchaudio", "triton", "nvidia-", "cuda-")
"""Packages, or beginnings of their names, that only the machine's own image has in one piece."""
TESTS = ("pytest", "hypothesis", "psutil")
"""What the stages need besides."""
GLIBC = (17, 24, 27, 28, 31, 34, 35, 39)
LIST, PIECE, WHEELS = "wheels.json", "piece", "wheels"


def fetch(folder: Path, *, engine: str, have: dict[str, str], python: str) -> None:
    """Fetch the wheels of the engine, and of what all here needs that the machine does not have.

    Args:
        folder: For the wheels.
        engine: As pip takes it.
        have: Versions by name, of the machine.
        python: Its version, such as ``3.12``.
    """
    from pip._vendor.packaging.requirements import Requirement

    own = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    linux |= {"python_version": python, "python_full_version": f"{python}.0"}
    due, found = deque(map(Requirement, (engine, *own, *TESTS))), dict(have)
    wanted: dict[str, Any] = {}
    while due:
        each = due.popleft()
        name = _key(each.name)
        if name.startswith(TORCH):
            print(f"not carried: {each}; the machine has {have.get(name, 'none')}")
            continue
        wanted[name] = each.specifier & wanted[name] if name in wanted else each.specifier
        if name in found and wanted[name].contains(found[name], prereleases=True):
            continue
        wheel = _fetch_one(folder / name, f"{each.name}{wanted[name]}", python)
        metadata = message_from_bytes(_metadata(wheel))
        found[name] = metadata["Version"]
        for line in metadata.get_all("Requires-Dist", ()):
            more = Requirement(line)
            extras = [{**linux, "extra": extra} for extra in ("", *each.extras)]
            if more.marker is None or any(map(more.marker.evaluate, extras)):
                due.append(more)


def _fetch_one(folder: Path, requirement: str, python: str) -> Path:
    """Fetch a wheel in place of the version that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    argv += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    argv += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    argv += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", requirement]
    subprocess.run(argv, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (
            each for each in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)
        )
        return file.read(name)


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def build(folder: Path) -> None:
    """Build the project's own wheel: without it the engine does not find its entry points."""
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*argv, str(folder), str(ROOT)], check=True)


def split(wheels: Path, folder: Path, *, piece_bytes: int) -> list[Path]:
    """Cut wheels, the small ones first, into pieces; return the folder of each."""
    files = sorted(wheels.rglob("*.whl"), key=lambda file: file.stat().st_size)
    listed = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": _digest(file)} for file in files
    ]
    total = sum(file.stat().st_size for file in files)
    count = -(-total // piece_bytes)
    about = json.dumps({"pieces": count, "piece_bytes": piece_bytes, "wheels": listed}, indent=1)
    stream = b"".join(file.read_bytes() for file in files)
    made = []
    for number in range(count):
        own = folder / f"{number:03d}"
        own.mkdir(parents=True)
        (own / LIST).write_text(about + "\n", "utf-8")
        part = stream[number * piece_bytes :][:piece_bytes]
        (own / f"{PIECE}.{number:03d}").write_bytes(part)
        made.append(own)
    return made


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def take(carried: Path, pieces: Path) -> None:
    """Keep the pieces that are in a folder, and join the wheels that are whole with them.

    Raises:
        SystemExit: A wheel is not what was cut.
    """
    (pieces / WHEELS).mkdir(parents=True, exist_ok=True)
    for file in sorted(carried.rglob("*")):
        if file.name == LIST or file.name.startswith(f"{PIECE}."):
            shutil.copyfile(file, pieces / file.name)
    about = _about(pieces)
    size, begin = about["piece_bytes"], 0
    for wheel in about["wheels"]:
        end = begin + wheel["bytes"]
        parts = [pieces / f"{PIECE}.{n:03d}" for n in range(begin // size, -(-end // size))]
        target = pieces / WHEELS / wheel["name"]
        if not target.exists() and all(part.exists() for part in parts):
            joined = b"".join(part.read_bytes() for part in parts)[begin % size :]
            target.write_bytes(joined[: wheel["bytes"]])
            if _digest(target) != wheel["sha256"]:
                target.unlink()
                raise SystemExit(f"{wheel['name']} is not what was cut: carry its pieces again")
        begin = end


def missing(pieces: Path) -> str:
    """Say which pieces have not been taken; empty if nothing is carried, or nothing is missing."""
    if not (pieces / LIST).exists():
        return ""
    count = _about(pieces)["pieces"]
    left = [n for n in range(count) if not (pieces / f"{PIECE}.{n:03d}").exists()]
    return f"pieces {', '.join(map(str, left))} of {count}" if left else ""


def install(pieces: Path, site: Path) -> None:
    """Install the wheels that are whole and have not been installed."""
    fresh = [file for file in (pieces / WHEELS).glob("*.whl") if not _mark(file).exists()]
    if fresh:
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        argv += ["--no-compile", "--upgrade", "--target", str(site)]
        subprocess.run([*argv, *map(str, fresh)], check=True)
        for file in fresh:
            _mark(file).touch()


def _mark(wheel: Path) -> Path:
    return wheel.with_suffix(".installed")


def _about(pieces: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pieces / LIST).read_text("utf-8"))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Make pieces from the command line."""
    parser = argparse.ArgumentParser(prog="ci.carry", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="for the pieces, each in a folder of its own")
    parser.add_argument("--engine", default=ENGINE, help=f"default: {ENGINE}")
    parser.add_argument("--python", default="3.12", help="of the machine (default: 3.12)")
    parser.add_argument("--have", type=Path, help="its pip freeze; default: it has nothing")
    parser.add_argument("--piece-mib", type=float, default=50.0, help="default: 50")
    options = parser.parse_args(argv)
    lines = options.have.read_text("utf-8").splitlines() if options.have else []
    pairs = (line.partition("==") for line in lines if "==" in line)
    have = {_key(name): version.partition("+")[0].strip() for name, _, version in pairs}
    with tempfile.TemporaryDirectory() as scratch:
        fetch(Path(scratch), engine=options.engine, have=have, python=options.python)
        build(Path(scratch))
        made = split(Path(scratch), options.folder, piece_bytes=int(options.piece_mib * (1 << 20)))
    print(f"{len(made)} pieces in {options.folder}; take each by --take")


if __name__ == "__main__":
    main()
