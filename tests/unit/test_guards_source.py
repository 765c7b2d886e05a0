"""Rules about the source text itself, which no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "epd_portable"
MAX_LINES = 700

VENDOR = re.compile(r"(cuda|npu|hccl|nccl)(:\d*)?")
VENDOR_OR_CPU = re.compile(r"(cuda|npu|hccl|nccl|cpu|gloo)(:\d*)?")

# Where a vendor's name may stand as a plain string outside platforms/, and why.
# Comparing with one is refused in these places too.
NAMES_ALLOWED = {
    "config/instance.py": "spells the values of --platform, from which everything else takes them",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the constants that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def strings(node: ast.AST, pattern: re.Pattern[str]) -> Iterator[ast.Constant]:
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Constant)
            and isinstance(inner.value, str)
            and pattern.fullmatch(inner.value)
        ):
            yield inner


# What tells one platform from another, and what asks for one by name.
IDENTITY = ("name", "device_type", "dist_backend")
OWNER = re.compile(r"_?(.*_)?(platform|traits)")
QUESTION = re.compile(r"is_(cuda|npu|rocm|xpu|hip)(_\w+)?")


def belongs_to_a_platform(node: ast.Attribute) -> bool:
    """Tell whether an attribute is one of a platform, as in ``self._platform.name``."""
    owner = node.value
    word = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return OWNER.fullmatch(word) is not None


def identifies_a_platform(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in IDENTITY and belongs_to_a_platform(node)


def asks_for_a_vendor(node: ast.AST) -> bool:
    """Tell whether an expression asks for one vendor; ``tensor.is_cpu`` asks for host memory."""
    if not isinstance(node, ast.Attribute):
        return isinstance(node, ast.Name) and QUESTION.fullmatch(node.id) is not None
    if node.attr == "is_cpu":
        return belongs_to_a_platform(node)
    return QUESTION.fullmatch(node.attr) is not None


def vendor_branches(tree: ast.AST) -> Iterator[str]:
    """Yield ``line: what`` of everything that branches on a vendor.

    That is a vendor's name in a comparison, a match case, a prefix test or as the key of a mapping;
    a comparison or match of what identifies a platform, whatever the other side is; and torch's
    and vLLM's questions for one vendor.
    """
    for node in ast.walk(tree):
        literals: list[ast.AST] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                literals = [node]
                for side in (left, *others):
                    if identifies_a_platform(side):
                        yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Match(subject=subject) if identifies_a_platform(subject):
                yield f"{node.lineno}: match {ast.unparse(subject)}"
            case ast.MatchValue():
                literals = [node]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith")):
                literals = [node]
            case ast.Dict(keys=keys):
                literals = [key for key in keys if isinstance(key, ast.Constant)]
            case ast.Attribute() | ast.Name() if asks_for_a_vendor(node):
                yield f"{node.lineno}: {ast.unparse(node)}"
        for literal in literals:
            for found in strings(literal, VENDOR_OR_CPU):
                yield f"{found.lineno}: {found.value!r}"


def vendor_names(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield every vendor name that stands as a string of its own, docstrings left out."""
    ignored = docstrings(tree)
    yield from (found for found in strings(tree, VENDOR) if id(found) not in ignored)


def outside_platforms() -> list[Path]:
    return [path for path in modules() if "platforms" not in path.relative_to(PACKAGE).parts]


def test_no_code_outside_platforms_branches_on_a_vendor() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{branch}"
        for path in outside_platforms()
        for branch in vendor_branches(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, "ask the platform for a capability instead:\n" + "\n".join(found)


def test_vendor_names_outside_platforms_need_a_reason() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in outside_platforms()
        if path.relative_to(PACKAGE).as_posix() not in NAMES_ALLOWED
        for node in vendor_names(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, "take the name from the platform, or give a reason here:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'if platform.name == "npu": ...',
        'if "cuda" != kind: ...',
        'match kind:\n    case "npu": ...',
        'device.startswith("npu:")',
        'x = 1 if device.type == "cuda" else 2',
        '{"cpu": f, "other": g}[kind]()',
        "if platform.name == wanted: ...",
        "[p for p in all if p.traits.device_type in GPUS]",
        "match traits.dist_backend:\n    case HCCL: ...",
        "if tensor.is_npu: ...",
        "if current_platform.is_cpu(): ...",
    ],
)
def test_the_guard_sees_each_way_to_branch_on_a_vendor(source: str) -> None:
    assert list(vendor_branches(ast.parse(source)))


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    sources = [*modules(), *sorted((ROOT / "ci").rglob("*.py"))]
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in sources
    }
    too_long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long, f"split what has more than {MAX_LINES} lines"


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(module.relative_to(PACKAGE)))
    assert len(places) > 200, "the guard does not see the package's classes"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


# Hosts that hand out packages, images or models, and any index given to pip by its address.
REGISTRY = re.compile(
    r"(?:pypi|pythonhosted|pytorch|npmjs|quay|ghcr|gcr|docker|anaconda)\.(?:org|io|com)\b"
    r"|(?:index[-_]url|find[-_]links)\W{0,4}(?:https?|file)://",
    re.IGNORECASE,
)
PYTORCH_CPU_INDEX = re.compile(r"https://download\.pytorch\.org/whl/cpu(?![/\w])")


def registry_lines(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if REGISTRY.search(PYTORCH_CPU_INDEX.sub("", line)):
            yield f"{number}: {line.strip()}"


def test_no_file_names_a_registry_but_the_pytorch_cpu_index() -> None:
    found = []
    for path in tracked_files():
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{line}" for line in registry_lines(text)]
    assert not found, "name no package, image or model host:\n" + "\n".join(found)


# -- nothing that a peer sends is turned into code -------------------------------------------------

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


def test_code_deserializes_no_objects() -> None:
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


FOLDERS = re.compile(r"\.expanduser\(|Path\.home\(|\bgetuser\(|tempfile\.gettempdir\(")
FOLDERS_ALLOWED = {
    "config/folders.py": "the one place that knows containers without a home",
    "vllm_plugin/exposition.py": "in an engine, whose TMPDIR is the folder of the run",
}


def test_folders_of_the_user_come_from_one_module() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules()
        if FOLDERS.search(path.read_text("utf-8"))
    }
    assert found == FOLDERS_ALLOWED.keys()
