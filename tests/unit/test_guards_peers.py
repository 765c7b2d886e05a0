"""Nothing that a peer sends is ever turned into code: no unpickling, no evaluation, no objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "epd_portable"

FORBIDDEN_MODULES = {
    "_pickle",
    "cloudpickle",
    "code",
    "dill",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
    "xmlrpc",
    "multiprocessing.managers",
    "torch.package",
}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    # zmq, multiprocessing.connection.Connection, concurrent helpers
    "recv_pyobj",
    "send_pyobj",
    "recv_serialized",
    # torch.distributed: these pickle
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "rpc_sync",
    # yaml
    "full_load",
    "unsafe_load",
    "UnsafeLoader",
    "FullLoader",
    # pandas, numpy
    "read_pickle",
    "fromregex",
}
FORBIDDEN_CALLS = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "yaml.load"}
FORBIDDEN_KEYWORDS = {"allow_pickle"}
CONNECTION_PICKLES = {"recv", "send"}
"""Methods of multiprocessing's Connection, where its bytes methods are to be used."""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.AST) -> Iterator[str]:
    """Yield ``line: what`` of everything that could turn data into objects or code."""
    for node in ast.walk(tree):
        found: list[str] = []
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names if name.name in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=module, names=names):
                whole = [f"{module}.{name.name}" for name in names]
                found = [
                    name
                    for name in (module or "", *whole)
                    if name in FORBIDDEN_MODULES | FORBIDDEN_CALLS
                ]
                found += [n.name for n in names if n.name in FORBIDDEN_ATTRIBUTES]
            case ast.Name(id=name) if name in FORBIDDEN_NAMES:
                found = [name]
            case ast.Attribute(attr=attribute) if attribute in FORBIDDEN_ATTRIBUTES:
                found = [attribute]
            case ast.Attribute() if dotted(node) in FORBIDDEN_CALLS:
                found = [dotted(node)]
            case ast.Attribute(attr=attribute, value=owner) if attribute in CONNECTION_PICKLES:
                owned = dotted(owner).rpartition(".")[2]
                found = [dotted(node)] if owned.lstrip("_") == "connection" else []
            case ast.keyword(arg=argument) if argument in FORBIDDEN_KEYWORDS:
                found = [str(argument)]
        for what in found:
            yield f"{getattr(node, 'lineno', 0)}: {what}"


def test_nothing_turns_data_into_objects_or_code() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{danger}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for danger in dangers(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, "decode into named types instead (wire.codec.reader):\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "np.loadtxt(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "socket.recv_pyobj()",
        "self._connection.recv()",
        "connection.send(request)",
        "dist.broadcast_object_list(items)",
        "eval(text)",
    ],
)
def test_the_guard_sees_each_way(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "yaml.compose(text, Loader=yaml.SafeLoader)",
        "connection.recv_bytes(4096)",
        "socket.recv()",
        "group.send(tensor, timeout_s)",
        "re.compile(text)",
    ],
)
def test_the_guard_leaves_the_rest_alone(source: str) -> None:
    assert not list(dangers(ast.parse(source)))
