"""Changes of a release of vLLM: tiny releases, and the table of hooks against the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ci import hooks_diff
from ci.hooks_diff import READ, Release
from ci.vllm_hooks import HOOKS, Relied
from tests.kit.sources import PACKAGE, modules, nodes

BASE = """
from abc import abstractmethod
from vllm.v1.base import Base

class Part(Base):
    limit: int = 3

    def __init__(self, config):
        super().__init__()
        self.queue = []

    def step(self, output, /, tokens=0, *, wait=False):
        "Says something."
        self._inner(output)
        return tokens

    def _inner(self, output):
        self.hook.save(output)

def helper(first, second=2):
    return first
"""
OTHER = "class Base:\n    def idle(self):\n        self.rested = True\n"
HOOK = Relied(
    owner="v1.part.Part",
    by=("ours.py",),
    names=("step", "limit", "queue", "idle", "rested"),
    reaches=(("step", "save"),),
    implemented=True,
)
FUNCTION = Relied(owner="v1.part.helper", by=("ours.py",))
WHOLE = Relied(owner="v1.part.Part", by=("ours.py",), names=("limit",), fields=("limit", "past"))


def release(folder: Path, name: str, *changes: tuple[str, str]) -> Release:
    """Write a release whose two modules are `BASE` and `OTHER` with some text replaced."""
    texts = {"part.py": BASE, "base.py": OTHER}
    for old, new in changes:
        assert any(old in text for text in texts.values())
        texts = {module: text.replace(old, new) for module, text in texts.items()}
    place = folder / name / "vllm" / "v1"
    place.mkdir(parents=True)
    for path in (place, place.parent):
        (path / "__init__.py").touch()
    for module, text in texts.items():
        (place / module).write_text(text)
    return Release(name, folder / name)


@pytest.mark.parametrize(
    ("changes", "must"),
    [
        ([], ""),
        ([("def step(", "def advance(")], "vllm.v1.part.Part.step: neither declared nor assigned"),
        ([("self.queue = []", "self.line = []")], "vllm.v1.part.Part.queue: neither"),
        ([("self.rested", "self.slept")], "vllm.v1.part.Part.rested: neither"),
        ([("self.hook.save(output)", "pass")], "step calls save: does not"),
        ([("tokens=0, *", "tokens, *")], "vllm.v1.part.Part.step: was step(output, /"),
        ([(", wait=False", ", rest=False")], "vllm.v1.part.Part.step: was"),
        ([("output, /, tokens=0", "output, tokens=0, /")], "vllm.v1.part.Part.step: was"),
        (
            [("first, second=2", "second=2, first=1")],
            "vllm.v1.part.helper: was helper(first, second=2)",
        ),
        ([("class Part(", "class Piece(")], "vllm.v1.part.Part: gone; no such name is left"),
        (
            [("class Part(", "class Piece("), ("class Base:", "class Part: ...\nclass Base:")],
            "vllm.v1.part.Part: gone; such a name is in vllm.v1.base",
        ),
        (
            [("    limit:", "    @abstractmethod\n    def new(self): ...\n    limit:")],
            "vllm.v1.part.Part.new: is new, and abstract: new()",
        ),
    ],
)
def test_changed_hook_is_reported_with_its_users(
    tmp_path: Path, changes: list[tuple[str, str]], must: str
) -> None:
    old, new = release(tmp_path, "0.1.0"), release(tmp_path, "0.2.0", *changes)
    findings = hooks_diff.compare(old, new, (HOOK, FUNCTION))
    if not must:
        assert (findings.must, findings.read) == ([], {})
        assert findings.same == 7
        return
    assert must in findings.must[0]
    assert all(line.endswith("[ours.py]") for line in findings.must)


def test_new_field_must_be_followed_where_all_fields_are_read(tmp_path: Path) -> None:
    change = ("limit: int = 3", "limit: int = 3\n    more: bool = False")
    old, new = release(tmp_path, "0.1.0"), release(tmp_path, "0.2.0", change)
    assert hooks_diff.compare(old, old, (WHOLE,)).must == []
    (line,) = hooks_diff.compare(old, new, (WHOLE,)).must
    assert line.startswith("vllm.v1.part.Part.more: is a new field")


@pytest.mark.parametrize(
    ("change", "title"),
    [
        (("return tokens", "return tokens + 1"), "vllm.v1.part.Part.step  [ours.py]"),
        (("wait=False", "wait=False, more=True"), "vllm.v1.part.Part.step  [ours.py]"),
        (("return first", "return second"), "vllm.v1.part.helper  [ours.py]"),
        (
            ("    limit: int = 3", "    limit: int = 3\n    def new(self): ..."),
            "vllm.v1.part.Part.new is new  [ours.py]",
        ),
    ],
)
def test_hook_with_fitting_calls_is_only_to_be_read(
    tmp_path: Path, change: tuple[str, str], title: str
) -> None:
    old, new = release(tmp_path, "0.1.0"), release(tmp_path, "0.2.0", change)
    findings = hooks_diff.compare(old, new, (HOOK, FUNCTION))
    assert findings.must == []
    assert list(findings.read) == [title]
    said = hooks_diff.report(findings, old, new, bodies=True)
    assert "1 have other bodies" in said
    assert any(line.strip().startswith("+") for line in said.splitlines())


def test_everything_that_is_imported_is_in_the_table() -> None:
    imported = {
        f"{node.module}.{alias.name}".removeprefix("vllm.")
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    }
    owners = {hook.owner for hook in HOOKS}
    # Of a module that is imported, its classes and functions are listed.
    assert imported <= owners | {owner.rpartition(".")[0] for owner in owners}
    assert len(imported) > 10


def test_users_of_a_hook_are_files_that_name_it() -> None:
    for hook in HOOKS:
        text = "".join((PACKAGE / name).read_text("utf-8") for name in hook.by)
        name = hook.owner.rpartition(".")[2]
        words = hook.names or (name,)
        assert any(word in text for word in (*words, name)) or hook.reaches, hook


def test_every_owner_is_within_what_is_read() -> None:
    read = tuple(f"{each.removesuffix('.py').replace('/', '.')}." for each in READ)
    assert [hook.owner for hook in HOOKS if not f"{hook.owner}.".startswith(read)] == []


# `ci/jobs/engines.sh` runs it for each release.
@pytest.mark.full
@pytest.mark.needs_vllm
def test_the_table_is_true_of_the_installed_release(tmp_path: Path) -> None:
    installed = hooks_diff.installed(tmp_path / "installed")
    findings = hooks_diff.compare(installed, installed)
    assert findings.must == []
    assert findings.same > 150
