"""Mutation run: ``python -m tests.mutants transfer wire --count 40``.

Each mutant changes one operator, condition, number or statement in a copy of the checkout, and is
killed by the first test that fails. It gets the tests that a first run saw at its line or file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = {
    "config": "tests/unit/config tests/unit/launch/test_wrong_inputs.py",
    "encode": "tests/unit/encode tests/contract/test_host_copies.py tests/integration/transfer",
    "front": "tests/integration/front",
    "items": "tests/unit/items tests/contract/test_claims.py",
    "launch": "tests/unit/launch tests/integration/launch",
    "platforms": "tests/unit/platforms tests/contract/test_collective_group.py",
    "placement": "tests/unit/placement",
    "transfer": "tests/unit/transfer tests/contract tests/integration/transfer",
    "vllm_plugin": "tests/unit/vllm_plugin tests/integration/vllm_plugin",
    "wire": "tests/unit/wire tests/unit/encode tests/contract tests/integration/transfer",
}
"""Tests of each package; the models run for a minute each and are added with ``--tests``."""
OVER_VLLM = ("front", "vllm_plugin")
"""Packages whose tests import vLLM, which takes eight seconds of CPU."""
PAIRS = [(ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or)]
PAIRS += [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)]
SWAPS: dict[type, type] = {**dict(PAIRS), **{second: first for first, second in PAIRS}}
CHANGED = ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant
FRESH = ("tests", "epd_portable")
"""Modules that each run imports from its own checkout."""
DANGEROUS = "launch/run/sessions.py"
"""A mutant of it ends every process of the machine, so it is left out."""
SKIPPED = {"annotation", "returns", "decorator_list"}
SILENT = ("logger.", "log.", "'", '"')  # Log records and docstrings.


def mutants(path: str, source: str) -> Iterator[tuple[str, set[tuple[str, int]], str, str]]:
    """Yield path, changed lines, description and text of each mutant, line for line."""
    lines = source.encode().splitlines(keepends=True)
    for old, changed in filter(None, map(change, code(ast.parse(source)))):
        first, last, fill = old.lineno, old.end_lineno, "\n" * (old.end_lineno - old.lineno)
        new = ("{}{}" if isinstance(old, ast.stmt) else "({}{})").format(ast.unparse(changed), fill)
        words = f"{' '.join(ast.unparse(old).split())[:70]}  ->  {' '.join(new.split())[:70]}"
        before = b"".join([*lines[: first - 1], lines[first - 1][: old.col_offset]])
        after = b"".join([lines[last - 1][old.end_col_offset :], *lines[last:]])
        places = {(path, line) for line in range(first, last + 1)}
        yield path, places, f"{path}:{first}: {words}", before.decode() + new + after.decode()


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs: neither annotations, docstrings and log records nor texts of errors."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            of_class = name == "keywords" and isinstance(node, ast.ClassDef)
            if name in SKIPPED or of_class or not isinstance(child, ast.AST):
                continue
            text = "" if isinstance(child, ast.JoinedStr) else ast.unparse(child)
            silent = isinstance(child, ast.Expr) and text.startswith(SILENT)
            if not text or silent or "TYPE_CHECKING" in text[:20]:
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from code(child)


def change(node: Any) -> tuple[Any, ast.AST] | None:
    """Return a node to replace and its replacement."""
    new = copy.copy(node)
    match node:
        case ast.Compare() if type(node.ops[0]) in SWAPS:
            new.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        case ast.BoolOp() | ast.BinOp() if type(node.op) in SWAPS:
            new.op = SWAPS[type(node.op)]()
        case ast.UnaryOp(op=ast.Not()):
            new = node.operand
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, CHANGED):
            return node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool()):
            new.value = not node.value
        case ast.Constant(value=int() | float()):
            new.value = node.value + 1
        case ast.AugAssign() | ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            new = ast.Pass()
        case ast.Return() if node.value and ast.unparse(node.value) != "None":
            new.value = ast.Constant(None)
        case _:
            return None
    return node, new


class Chosen:
    """Plug-in of pytest: these tests in this order, or all of them and the lines they execute."""

    def __init__(self, folder: str, names: Sequence[str] = ()) -> None:
        self.folder, self.places = folder, {name: place for place, name in enumerate(names)}
        self.found: dict[str, tuple[float, list[tuple[str, int]]]] = {}
        self.ended: dict[str, list[str]] = {"skipped": [], "failed": [], "passed": []}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if places := self.places:
            items[:] = [item for item in items if item.nodeid in places]
            items.sort(key=lambda item: places[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        started, self.lines = time.monotonic(), set[tuple[str, int]]()
        if not self.places:
            sys.settrace(self._trace)
            threading.settrace(self._trace)
        result = yield
        sys.settrace(None)
        self.found[item.nodeid] = (time.monotonic() - started, sorted(self.lines))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ended[report.outcome].append(report.nodeid)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if (name := frame.f_code.co_filename).startswith(self.folder):
            self.lines.add((name, frame.f_lineno))
            return self._trace


def run_pytest(tree: Path, arguments: Sequence[str], plugin: Chosen) -> int:
    """Run pytest in a fork of this process, which has imported libraries; return its status."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    with (tree / "mutant.log").open("wb") as log:
        os.dup2(os.dup2(log.fileno(), 1), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = f"{tree}:{tree}/benchmarks"
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in FRESH]:
        del sys.modules[name]
    imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *imported, *arguments], plugins=[plugin])
    (tree / "found.json").write_text(json.dumps([plugin.found, plugin.ended]), "utf-8")
    os._exit(status)


def run(tree: Path, package: str, options: argparse.Namespace) -> float:
    """Print the mutants of a package that survive; return the share of killed ones in percent."""
    target = tree / "epd_portable" / package
    run_pytest(tree, options.tests or TESTS[package.partition("/")[0]].split(), Chosen(str(target)))
    found, ended = json.loads((tree / "found.json").read_text("utf-8"))
    quick = sorted(found.keys() - set(ended["skipped"] + ended["failed"]), key=found.get)
    reached = {name: set(map(tuple, found[name][1])) for name in quick}
    print(f"{package}: {len(quick)} tests; failed without a mutant: {ended['failed']}", flush=True)
    paths = sorted(target.rglob("*.py")) if target.is_dir() else [target]
    sources = {str(p): p.read_text("utf-8") for p in paths if not str(p).endswith(DANGEROUS)}
    every = [each for path, source in sources.items() for each in mutants(path, source)]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    survived = 0
    for path, lines, words, text in chosen:
        near = [name for name in quick if any(path == other for other, _ in reached[name])]
        names = [name for name in near if lines & reached[name]] or near or quick
        files = {name.partition("::")[0] for name in names}
        Path(path).write_text(text, "utf-8")
        limit = f"--session-timeout={60 + 5 * sum(found[name][0] for name in names):.0f}"
        if not run_pytest(tree, ["-x", "--timeout=120", limit, *files], Chosen("", names)):
            survived += 1
            print(f"survived {len(names)} tests: {words}".replace(f"{tree}/", ""), flush=True)
        Path(path).write_text(sources[path], "utf-8")
    print(f"{package}: {len(chosen) - survived} of {len(chosen)} mutants killed", flush=True)
    return 100 - 100 * survived / len(chosen)


def main() -> int:
    """Run from the command line; return 1 if fewer mutants are killed than ``--least``."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("packages", nargs="+", help="transfer, wire, transfer/pool.py …")
    parser.add_argument("--count", type=int, default=40, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="in place of those of the package")
    parser.add_argument("--least", type=int, default=0, help="killed mutants, percent")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    importlib.import_module("torch")
    if any(package.startswith(OVER_VLLM) for package in options.packages):
        importlib.import_module("vllm.entrypoints.openai.api_server")
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in filter(lambda name: os.path.lexists(ROOT / name), listed.decode().splitlines()):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(folder, name), follow_symlinks=False)
        Path(folder, ".venv").symlink_to(ROOT / ".venv")
        return int(
            min(run(Path(folder), each, options) for each in options.packages) < options.least
        )


if __name__ == "__main__":
    sys.exit(main())
