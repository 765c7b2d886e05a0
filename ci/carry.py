"""Carries files to a machine without a network, in pieces of a size that reaches it.

Where there is a network: ``python -m ci.carry FOLDER --have image.txt``, with what ``pip freeze``
reports on that machine. Each piece has a folder of its own with the list of all files: wheels, and
what a vLLM of the same release has found out of its models' classes. There the pieces are taken in
any order; what is whole is installed at once, the engine, by far the largest, last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "vllm==0.26.0"
"""The release that is built for torch 2.11."""
TORCH = ("torch", "torchvision", "torchaudio", "triton", "nvidia-", "cuda-")
"""Packages, or beginnings of their names, that only the machine's own image has in one piece."""
TESTS = ("pytest", "pytest-asyncio", "hypothesis", "psutil")
"""Packages that the stages need in addition."""
GLIBC = range(5, 40)
LIST, PIECE, WHOLE = "files.json", "piece", "whole"
MODELINFOS = "modelinfos"
"""Folder of vLLM's cache; a file there is used if its model's source has the same hash."""
FATBIN = struct.Struct("<IHHQ")
"""Header of device code in a library: magic, version, bytes of this header, bytes behind it."""
MAGIC, VERSION = 0xBA55ED50, 1
CODE = struct.Struct("<HHIQ12xI")
"""Header of an architecture: kind, version, its bytes, bytes behind it, compute capability."""
MACHINE_CODE = 2
"""The kind that a device runs as it is; the other is compiled for it when it is loaded."""


def fetch(
    folder: Path, *, engine: str, have: dict[str, str], without: Sequence[str], python: str
) -> None:
    """Fetch the wheels of the engine, and of what all here needs that the machine does not have.

    Args:
        folder: For the wheels.
        engine: As pip takes it.
        have: Versions by name, of the machine.
        without: What the engine requests and can do without.
        python: Its version, such as ``3.12``.
    """
    pip = [sys.executable, "-m", "pip"]
    where = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    where += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    where += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        asked = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--target", scratch]
        own = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
        wanted = [engine, *own, *TESTS]
        subprocess.run([*asked, "--report", str(report), *where, *wanted], check=True)
        found = json.loads(report.read_text("utf-8"))["install"]
    metadata = [each["metadata"] for each in found]
    versions = {_key(each["name"]): each["version"] for each in metadata}
    carried = versions.keys() - have.keys() - set(map(_key, without))
    # What is carried may want another version of what is there, which is then carried too.
    while (
        more := {
            name
            for each in metadata
            if _key(each["name"]) in carried
            for name in _unmet(each, have)
        }
        - carried
    ):
        carried |= more
    for name in sorted(carried):
        if name.startswith(TORCH):
            print(f"not carried: {name}; the machine has {have.get(name, 'none')}")
        else:
            argv = [*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), *where]
            subprocess.run([*argv, f"{name}=={versions[name]}"], check=True)


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _unmet(metadata: dict[str, Any], have: dict[str, str]) -> set[str]:
    """Return what a package needs in another version than the machine has."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = map(Requirement, metadata.get("requires_dist", ()))
    return {
        _key(each.name)
        for each in wanted
        if (each.marker is None or each.marker.evaluate({"extra": ""}))
        and _key(each.name) in have
        and not each.specifier.contains(have[_key(each.name)], prereleases=True)
    }


def build(folder: Path) -> None:
    """Build the project's own wheel: without it the engine does not find its entry points."""
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*argv, str(folder), str(ROOT)], check=True)


def trim(wheel: Path, compute: int) -> None:
    """Write a wheel again, denser, with the device code of one compute capability only.

    The rest becomes zeros in its place, as no address may change.

    Args:
        wheel: Replaced.
        compute: Such as ``90``, of an H100 or H200.
    """
    dense = wheel.with_suffix(".dense")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(dense, "w", zipfile.ZIP_LZMA) as kept:
        for each in whole.infolist():
            data = bytearray(whole.read(each))
            if each.filename.endswith(".so"):
                _clear_device_code(data, compute)
            fresh = zipfile.ZipInfo(each.filename, each.date_time)
            fresh.external_attr, fresh.compress_type = each.external_attr, zipfile.ZIP_LZMA
            kept.writestr(fresh, bytes(data))
    dense.replace(wheel)


def _clear_device_code(library: bytearray, compute: int) -> None:
    begin = -1
    while (begin := library.find(struct.pack("<I", MAGIC), begin + 1)) >= 0:
        if begin + FATBIN.size > len(library):
            return
        _, version, header, nbytes = FATBIN.unpack_from(library, begin)
        if (version, header) != (VERSION, FATBIN.size):
            continue  # These four bytes are something else.
        place, end = begin + header, begin + header + nbytes
        while place < end:
            kind, _, own_header, own, capability = CODE.unpack_from(library, place)
            if (kind, capability) != (MACHINE_CODE, compute):
                library[place + own_header : place + own_header + own] = bytes(own)
            place += own_header + own


def split(whole: Path, folder: Path, *, piece_bytes: int) -> list[Path]:
    """Cut the files of a folder, the small ones first, into pieces; return the folder of each."""
    files = sorted(whole.iterdir(), key=lambda file: file.stat().st_size)
    listed = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": _digest(file)} for file in files
    ]
    total = sum(file.stat().st_size for file in files)
    count = -(-total // piece_bytes)
    about = json.dumps({"pieces": count, "piece_bytes": piece_bytes, "files": listed}, indent=1)
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
    """Keep the pieces that are in a folder, and join the files that are whole with them.

    Raises:
        SystemExit: A file is not what was cut.
    """
    (pieces / WHOLE).mkdir(parents=True, exist_ok=True)
    for file in sorted(carried.rglob("*")):
        if file.name == LIST or file.name.startswith(f"{PIECE}."):
            shutil.copyfile(file, pieces / file.name)
    about = _about(pieces)
    size, begin = about["piece_bytes"], 0
    for each in about["files"]:
        end = begin + each["bytes"]
        parts = [pieces / f"{PIECE}.{n:03d}" for n in range(begin // size, -(-end // size))]
        target = pieces / WHOLE / each["name"]
        if not target.exists() and all(part.exists() for part in parts):
            joined = b"".join(part.read_bytes() for part in parts)[begin % size :]
            target.write_bytes(joined[: each["bytes"]])
            if _digest(target) != each["sha256"]:
                target.unlink()
                raise SystemExit(f"{each['name']} is not what was cut: carry its pieces again")
        begin = end


def missing(pieces: Path) -> str:
    """Return the pieces that are missing; empty if none are, or nothing is carried."""
    if not (pieces / LIST).exists():
        return ""
    count = _about(pieces)["pieces"]
    left = [n for n in range(count) if not (pieces / f"{PIECE}.{n:03d}").exists()]
    return f"pieces {', '.join(map(str, left))} of {count}" if left else ""


def install(pieces: Path, site: Path, cache: Path) -> None:
    """Install what is whole and has not been installed, and compile it.

    With the package here: where Python may write no bytecode, every process would compile for 10 s.

    Args:
        pieces: What has been taken.
        site: For the wheels.
        cache: Of vLLM.
    """
    (cache / MODELINFOS).mkdir(parents=True, exist_ok=True)
    for file in (pieces / WHOLE).glob("*.json"):
        shutil.copyfile(file, cache / MODELINFOS / file.name)
    fresh = [file for file in (pieces / WHOLE).glob("*.whl") if not _mark(file).exists()]
    if fresh:
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        argv += ["--no-compile", "--upgrade", "--target", str(site)]
        subprocess.run([*argv, *map(str, fresh)], check=True)
        argv = [sys.executable, "-m", "ci.bytecode", str(site), str(ROOT / "epd_portable")]
        subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
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
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="PACKAGE", help="that the engine can do without"
    )
    parser.add_argument("--piece-mib", type=float, default=50.0, help="default: 50")
    parser.add_argument(
        "--modelinfos",
        type=Path,
        metavar="FOLDER",
        help="of the cache of a vLLM of this release, on any platform: spares a start 25 s",
    )
    parser.add_argument(
        "--compute",
        type=int,
        help="device code for this compute capability only, such as 90 (H200)",
    )
    options = parser.parse_args(argv)
    lines = options.have.read_text("utf-8").splitlines() if options.have else []
    pairs = (line.partition("==") for line in lines if "==" in line)
    have = {_key(name): version.partition("+")[0].strip() for name, _, version in pairs}
    with tempfile.TemporaryDirectory() as scratch:
        fetch(
            Path(scratch),
            engine=options.engine,
            have=have,
            without=options.without,
            python=options.python,
        )
        build(Path(scratch))
        for wheel in Path(scratch).glob("*.whl") if options.compute else ():
            trim(wheel, options.compute)
        for file in options.modelinfos.glob("*.json") if options.modelinfos else ():
            shutil.copy(file, scratch)
        made = split(Path(scratch), options.folder, piece_bytes=int(options.piece_mib * (1 << 20)))
    print(f"{len(made)} pieces in {options.folder}; take each by --take")


if __name__ == "__main__":
    main()
