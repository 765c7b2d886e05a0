"""The table is the only writer of items, and the pool the only writer of slots."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import epd_portable

PACKAGE = Path(epd_portable.__file__).parent
OWNERS = {
    "state": {"items/table.py", "items/slots.py", "encode/producer.py"},  # Its own transfers.
    "slot": {"items/table.py"},
    "holders": {"items/table.py"},
}
CHANGES = {"add", "clear", "difference_update", "discard", "pop", "remove", "update"}


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield attributes that are assigned to, or sets that are changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in CHANGES and isinstance(owner, ast.Attribute):
                yield owner


def test_items_and_slots_have_one_writer() -> None:
    found = {
        (place, node.attr)
        for folder in ("items", "encode", "vllm_plugin", "runners")
        for path in (PACKAGE / folder).glob("*.py")
        for place in [path.relative_to(PACKAGE).as_posix()]
        for node in written(ast.parse(path.read_text()))
        if node.attr in OWNERS
    }
    assert ("items/table.py", "state") in found
    assert ("items/table.py", "holders") in found
    foreign = {(place, name) for place, name in found if place not in OWNERS[name]}
    assert foreign == set()
