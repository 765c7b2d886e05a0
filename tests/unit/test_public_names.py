"""Extension points change only on purpose: what users subclass, register, raise or configure.

``public_names.txt`` lists them, one a line, with the parameters of what can be called. To change it
openly::

    python tests/unit/test_public_names.py

writes the list anew; commit it with the change, and say in ``CHANGELOG.md`` what users must do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("public_names.txt")

SOURCES = (
    "epd_portable/config/choice.py",
    "epd_portable/config/groups.py",
    "epd_portable/config/front.py",
    "epd_portable/config/schema.py",
    "epd_portable/config/store.py",
    "epd_portable/transfer/registry.py",
    "epd_portable/transfer/stores/base.py",
    "epd_portable/transfer/paths/base.py",
    "epd_portable/errors.py",
    "epd_portable/platforms/base.py",
    "epd_portable/platforms/traits.py",
    "epd_portable/placement/profiles/selection_types.py",
)
NOT_PUBLIC = {"T", "SlotT"}
HEADER = "# Public names; change this file with tests/unit/test_public_names.py, openly.\n"


def parameters(arguments: ast.arguments, *, of_method: bool) -> str:
    """Return the parameters as written, with ``...`` for defaults and without annotations."""
    if of_method:
        del arguments.args[0]
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    for extra in (arguments.vararg, arguments.kwarg):
        if extra is not None:
            extra.annotation = None
    some = ast.Constant(...)
    arguments.defaults = [some for _ in arguments.defaults]
    arguments.kw_defaults = [default and some for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def names(body: list[ast.stmt], prefix: str, *, in_class: bool = False) -> Iterator[str]:
    """Yield every public name that the statements define, members of classes included."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found = [node.name]
            case ast.ClassDef():
                found = [node.name]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found = [name]
            case ast.Assign():
                found = [target.id for target in node.targets if isinstance(target, ast.Name)]
            case _:
                found = []
        for name in found:
            if (name.startswith("_") and name != "__init__") or name in NOT_PUBLIC:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = {ast.unparse(each) for each in node.decorator_list}
                of_method = in_class and "staticmethod" not in decorators
                call = f"({parameters(node.args, of_method=of_method)})"
                yield f"{prefix}{name}{'' if 'property' in decorators else call}"
            elif isinstance(node, ast.ClassDef):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                yield f"{prefix}{name}({bases})" if bases else f"{prefix}{name}"
                yield from names(node.body, f"{prefix}{name}.", in_class=True)
            else:
                yield f"{prefix}{name}"


def public_names() -> list[str]:
    found: list[str] = []
    for source in SOURCES:
        module = source.removesuffix(".py").replace("/", ".")
        found += names(ast.parse((ROOT / source).read_text("utf-8")).body, f"{module}.")
    return sorted(found)


def test_public_names_are_those_that_were_agreed() -> None:
    agreed = [line for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#")]
    present = public_names()
    gone = [f"- {name}" for name in agreed if name not in present]
    new = [f"+ {name}" for name in present if name not in agreed]
    assert not gone + new, (
        "public names have changed:\n"
        + "\n".join(gone + new)
        + "\nUsers rely on them. If that is meant: run `python tests/unit/test_public_names.py`, "
        "commit public_names.txt with the change, and tell users in CHANGELOG.md."
    )


def test_a_renamed_parameter_and_a_lost_member_are_seen() -> None:
    before = "class A(ABC):\n    x: int\n    def f(self, a: int, *, b: str = 'z') -> None: ..."
    after = "_x = 1\nclass A(ABC):\n    def f(self, c: int, *, b: str = 'z') -> None: ..."
    old, new = (set(names(ast.parse(source).body, "m.")) for source in (before, after))
    assert old == {"m.A(ABC)", "m.A.x", "m.A.f(a, *, b=...)"}
    assert new == {"m.A(ABC)", "m.A.f(c, *, b=...)"}


if __name__ == "__main__":
    LIST.write_text(HEADER + "".join(f"{name}\n" for name in public_names()), "utf-8")
    print(f"wrote {LIST}")
