"""Rules about the source text itself, which no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.kit import sources
from tests.kit.commands import run
from tests.kit.prose import BANNED
from tests.kit.sources import PACKAGE, ROOT, modules, text

MAX_LINES = 700
CODE = [each for folder in ("benchmarks", "ci", "tools") for each in modules(ROOT / folder)]
TESTS = modules(ROOT / "tests")

# Words of comments, docstrings and names.

FIRST_WORDS = (
    r"(?:what|how|whether|where|when|why|which|who|whoever|whom|whose|that|those|these|this|there|"
    r"they|them|it|its|he|one|nobody|nothing|something|as|of|if)"
)
"""Words that begin no docstring and no name of a test: a noun or a verb does."""
MAX_BANNED_WORDS = 86
"""Most of them in strings and comments. A change that lowers them sets the new number."""


def test_docstrings_and_names_of_tests_begin_with_a_noun_or_verb() -> None:
    docstring = re.compile(rf'^[ ]*"""({FIRST_WORDS}\b.*)', re.MULTILINE | re.IGNORECASE)
    found = [line for path in (*modules(), *CODE, *TESTS) for line in docstring.findall(text(path))]
    assert found == []
    names = [
        name
        for path in TESTS
        for name in re.findall(r"^ *(?:async )?def test_(\w+)", text(path), re.M)
    ]
    assert [name for name in names if re.match(rf"{FIRST_WORDS}(\b|_)", name)] == []
    assert [name for name in names if len(name) > 60 - len("test_")] == []


def test_banned_words_stay_within_their_budget() -> None:
    paths = (*modules(), *CODE)
    words = [str(each.value) for path in paths for each in sources.strings(path)]
    words += [line for path in paths for line in re.findall(r"(?:^|\s)#.*$", text(path), re.M)]
    found = sum(len(BANNED.findall(each)) for each in words)
    assert found <= MAX_BANNED_WORDS


def test_modules_have_few_lines() -> None:
    paths = (*modules(), *modules(ROOT / "ci"))
    assert [path for path in paths if len(text(path).splitlines()) > MAX_LINES] == []


def test_public_classes_have_different_names() -> None:
    names = [
        node.name
        for module in modules()
        for node in sources.nodes(module)[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(names) > 200, "the guard does not see the package's classes"
    assert sorted(names) == sorted({*names})


# Vendors are named and compared in platforms/ only.

VENDOR = re.compile(r"(cuda|npu|hccl|nccl)(:\d*)?")
VENDOR_OR_CPU = re.compile(r"(cuda|npu|hccl|nccl|cpu|gloo)(:\d*)?")
NAMES_ALLOWED = {"config/instance.py": "the values of --platform, which everything else reads"}
IDENTITY = ("name", "device_type", "dist_backend")
OWNER = re.compile(r"_?(.*_)?(platform|traits)")
QUESTION = re.compile(r"is_(cuda|npu|rocm|xpu|hip)(_\w+)?")
OUTSIDE = [path for path in modules() if "platforms" not in path.relative_to(PACKAGE).parts]


def vendors(nodes: Sequence[ast.AST], pattern: re.Pattern[str]) -> Iterator[ast.Constant]:
    for each in nodes:
        is_text = isinstance(each, ast.Constant) and isinstance(each.value, str)
        if is_text and pattern.fullmatch(each.value):
            yield each


def is_of_a_platform(node: ast.Attribute) -> bool:
    """Return whether an attribute is one of a platform, as in ``self._platform.name``."""
    owner = node.value
    word = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return OWNER.fullmatch(word) is not None


def identifies_a_platform(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in IDENTITY and is_of_a_platform(node)


def queries_a_vendor(node: ast.Attribute | ast.Name) -> bool:
    """Return whether an expression queries a vendor; ``tensor.is_cpu`` queries host memory."""
    if isinstance(node, ast.Attribute) and node.attr == "is_cpu":
        return is_of_a_platform(node)
    return bool(QUESTION.fullmatch(node.attr if isinstance(node, ast.Attribute) else node.id))


def vendor_branches(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines that branch on a vendor.

    That is a vendor's name in a comparison, a match case, a prefix test or as the key of a mapping,
    a comparison or match of an attribute that identifies a platform, and vendor queries of torch
    and vLLM.
    """
    for node in nodes:
        literals: list[ast.AST] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                literals = [*ast.walk(node)]
                if any(map(identifies_a_platform, (left, *others))):
                    yield node.lineno
            case ast.Match(subject=subject) if identifies_a_platform(subject):
                yield node.lineno
            case ast.MatchValue() | ast.Call(func=ast.Attribute(attr="startswith" | "endswith")):
                literals = [*ast.walk(node)]
            case ast.Dict(keys=keys):
                literals = [key for key in keys if key is not None]
            case ast.Attribute() | ast.Name() if queries_a_vendor(node):
                yield node.lineno
        yield from (found.lineno for found in vendors(literals, VENDOR_OR_CPU))


def test_no_code_outside_platforms_branches_on_a_vendor() -> None:
    found = [f"{path}:{line}" for path in OUTSIDE for line in vendor_branches(sources.nodes(path))]
    assert not found, "query a capability of the platform instead"


def test_vendor_names_outside_platforms_need_a_reason() -> None:
    found = [
        f"{path}:{each.lineno}: {each.value!r}"
        for path in OUTSIDE
        if path.relative_to(PACKAGE).as_posix() not in NAMES_ALLOWED
        for each in vendors(sources.strings(path), VENDOR)
        if id(each) not in sources.docstrings(path)
    ]
    assert not found, "take the name from the platform, or add a reason here"


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
def test_each_branch_on_a_vendor_is_found(source: str) -> None:
    assert list(vendor_branches([*ast.walk(ast.parse(source))]))


# No file names a registry, but for one index.

REGISTRY = re.compile(
    r"(?:pypi|pythonhosted|pytorch|npmjs|quay|ghcr|gcr|docker|anaconda)\.(?:org|io|com)\b"
    r"|(?:index[-_]url|find[-_]links)\W{0,4}(?:https?|file)://",
    re.IGNORECASE,
)
PYTORCH_CPU_INDEX = re.compile(r"https://download\.pytorch\.org/whl/cpu(?![/\w])")


def test_no_file_names_a_registry_but_the_pytorch_cpu_index() -> None:
    words = r"\.(org|io|com)|(index[-_]url|find[-_]links)"
    lines = run("git", "grep", "-nIiE", words).stdout.splitlines()
    assert any(PYTORCH_CPU_INDEX.search(line) for line in lines)
    found = [line for line in lines if REGISTRY.search(PYTORCH_CPU_INDEX.sub("", line))]
    assert not found, "name no package, image or model host"


# Data of peers become no objects or code.

DANGERS = re.compile(
    r"^\s*(?:import|from) (?:_?pickle|cloudpickle|code|dill|joblib|marshal|shelve|xmlrpc)\b"
    r"|\bmultiprocessing\.managers\b|\btorch\.package\b"
    # zmq and torch.distributed: these pickle.
    r"|\b(?:recv_pyobj|send_pyobj|recv_serialized|rpc_sync|allow_pickle|read_pickle|fromregex)\b"
    r"|\b(?:all_gather|broadcast|gather|recv|scatter|send)_object(?:_list)?\b"
    r"|\b(?:full_load|unsafe_load|UnsafeLoader|FullLoader)\b"
    r"|\b(?:torch|torch\.jit|numpy|np|yaml)\.load\b|\bfrom (?:torch|numpy|yaml) import .*\bload\b"
    r"|(?<![\w.])(?:eval|exec|compile|__import__)\("
    # Methods of a Connection of multiprocessing that pickle; those for bytes do not.
    r"|connection\.(?:recv|send)\(",
    re.MULTILINE,
)


def test_code_deserializes_no_objects() -> None:
    found = {str(path): found[0] for path in modules() if (found := DANGERS.search(text(path)))}
    assert not found, "decode into named types instead (wire.codec.reader)"


@pytest.mark.parametrize(
    ("source", "is_dangerous"),
    [
        ("import pickle", True),
        ("    from pickle import loads", True),
        ("torch.load(path)", True),
        ("from torch import load", True),
        ("np.loadtxt(path, allow_pickle=True)", True),
        ("yaml.load(text, Loader=yaml.SafeLoader)", True),
        ("yaml.unsafe_load(text)", True),
        ("socket.recv_pyobj()", True),
        ("self._connection.recv()", True),
        ("connection.send(request)", True),
        ("dist.broadcast_object_list(items)", True),
        ("x = eval(text)", True),
        ("yaml.compose(text, Loader=yaml.SafeLoader)", False),
        ("connection.recv_bytes(4096)", False),
        ("socket.recv()", False),
        ("group.send(tensor, timeout_s)", False),
        ("re.compile(text)", False),
    ],
)
def test_each_danger_is_found_and_nothing_else(source: str, is_dangerous: bool) -> None:
    assert bool(DANGERS.search(source)) == is_dangerous


# Folders and variables of the user come from one module.

USER_FOLDERS = re.compile(r"\.expanduser\(|Path\.home\(|\bgetuser\(|tempfile\.gettempdir\(")
FOLDERS_ALLOWED = {
    "config/folders.py": "the one place that knows containers without a home",
    "vllm_plugin/exposition.py": "in an engine, whose TMPDIR is the folder of the run",
}


def test_folders_of_the_user_come_from_one_module() -> None:
    found = {path for path in modules() if USER_FOLDERS.search(text(path))}
    assert {path.relative_to(PACKAGE).as_posix() for path in found} == FOLDERS_ALLOWED.keys()
