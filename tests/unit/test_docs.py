"""Documents name existing things only, and all that a user can set or meet."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import shlex
import subprocess
import tokenize
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from ci import hosts, reference
from epd_portable import envs
from epd_portable.config.load import OVERLAYS, PLATFORMS, parse_topology
from epd_portable.config.schema import Topology
from epd_portable.launch.notices import Event

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "epd_portable"
README = ROOT / "README.md"
STRUCTURES = ROOT / "docs/structures.md"
METRICS = ROOT / "docs/metrics.md"
DEPLOY = ROOT / "docs/deploy.md"
OPERATIONS = ROOT / "docs/operations.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
"""Pages for users, without records of decisions."""

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"\.?[\w-]+(/[\w.-]+)+/?|[\w-]+\.(md|py|yaml|toml)|Makefile")
KEY = re.compile(r"(?:" + "|".join(Topology.model_fields) + r")(?:\.(?:[a-z_]+|\*))+")


def read(path: Path) -> str:
    return path.read_text("utf-8")


def code_spans(path: Path) -> list[str]:
    """Return the inline code of a document, its fenced blocks left out."""
    return CODE.findall(FENCE.sub("", read(path)))


def commands(path: Path) -> Iterator[str]:
    """Yield command lines: inline code, and lines of shell blocks with continuations joined."""
    yield from code_spans(path)
    for language, block in FENCE.findall(read(path)):
        if language in ("bash", "sh", "console"):
            yield from block.replace("\\\n", " ").splitlines()


# -- structures ------------------------------------------------------------------------------------


def test_the_layers_in_structures_are_those_that_are_checked() -> None:
    contracts = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == ["epd_portable"])
    drawn = next(block for _, block in FENCE.findall(read(STRUCTURES)))
    assert drawn.split("\n")[:-1] == layers


# -- size and map ----------------------------------------------------------------------------------


def test_readme_is_short_and_shows_a_command_early() -> None:
    text = read(README)
    assert len(text.splitlines()) <= 150
    assert len(text.partition("```bash")[0].split()) <= 200


def test_map_links_every_page() -> None:
    linked = set(LINK.findall(read(ROOT / "docs/README.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: path.stem)
def test_first_paragraph_names_the_readers(page: Path) -> None:
    assert page.name == "transfers.md" or re.match(r"# .+\n\nFor \w+", read(page))


STOP_WORDS = "What|How|Where|Why|When|Who|Whoever|Which|That|Those|As|Of|If|It|There|This"
BANNED = re.compile(
    r"\b(?:pictures?|anew|whoever|whatever|nobody|beside|asks?|asked|tells?|told|says?|said|room|"
    r"answers?|answered|hears?|heard|parked|stand-ins?|by itself|goes on|gives? (?:up|back)|"
    r"lets? go|so does|the latter|alike)\b",
    re.IGNORECASE,
)
"""Everyday verbs and private words in place of terms of the field: docs/glossary.md."""
LONGEST_SENTENCE = 25
"""Words, also of a table cell."""
GENERATED = {f"{name}.md" for name in reference.PAGES}
SEMICOLONS_IN_TABLES = {
    "CONTRIBUTING.md": 5,
    "SECURITY.md": 4,
    "docs/choice.md": 11,
    "docs/comparison.md": 6,
    "docs/configuration.md": 17,
    "docs/decisions/0076-keys-not-offered.md": 1,
    "docs/deploy.md": 6,
    "docs/devices.md": 3,
    "docs/extending.md": 6,
    "docs/failures.md": 6,
    "docs/first-device.md": 1,
    "docs/front.md": 7,
    "docs/gateways.md": 5,
    "docs/glossary.md": 21,
    "docs/hosts.md": 3,
    "docs/kubernetes.md": 1,
    "docs/models.md": 7,
    "docs/observability.md": 6,
    "docs/operations.md": 11,
    "docs/remote-encoder.md": 1,
    "docs/status.md": 15,
    "docs/store.md": 2,
    "docs/structures.md": 27,
    "docs/transfers.md": 8,
    "docs/troubleshooting.md": 37,
    "docs/upgrade.md": 7,
}
"""By page, where there are any. A page that has fewer gets its new number: it only falls."""


@dataclass(frozen=True, kw_only=True)
class Prose:
    """The prose of a page, without code and addresses of links."""

    headings: list[str]
    cells: list[str]
    sentences: list[str]


def prose(text: str) -> Prose:
    text = re.sub(r"<!--.*?-->|^- Status:.*$", "", FENCE.sub("", text), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", CODE.sub("X", text))
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    plain = re.sub(r"^[|#].*$", "", text, flags=re.MULTILINE)
    return Prose(
        headings=re.findall(r"^#+ (?:\d+\. )?(.*)$", text, re.MULTILINE),
        cells=[cell for row in rows for cell in row.split("|")],
        sentences=re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*- |\n\s*\d+\. ", plain),
    )


def faults_of_prose(text: str) -> list[str]:
    """Return headings that begin with a stop word, and sentences and cells against the rules."""
    page = prose(text)
    parts = (*page.sentences, *page.cells)
    return [
        *(each for each in page.headings if re.match(rf"(?:{STOP_WORDS})\b", each)),
        *(each for each in page.sentences if ";" in each),
        *(each for each in parts if len(each.split()) > LONGEST_SENTENCE or BANNED.search(each)),
    ]


WRITTEN = [each for each in DOCUMENTS if each.name not in GENERATED]


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_is_short(document: Path) -> None:
    text = read(document)
    assert faults_of_prose(text) == []
    found = sum(cell.count(";") for cell in prose(text).cells)
    assert found == SEMICOLONS_IN_TABLES.get(document.relative_to(ROOT).as_posix(), 0)


def test_faults_of_prose_are_found() -> None:
    long = " ".join(["word"] * 26)
    text = f"# When it fails\n\nOne; two.\n\nIt tells.\n\n{long}\n\n| `a;b` | {long} |\n"
    assert faults_of_prose(text) == [
        *("When it fails", "One; two.", "It tells.", long, f" {long} "),
    ]


SOURCES = [
    path
    for folder in ("epd_portable", "benchmarks", "ci", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FIRST_WORDS = re.compile(
    r"(what|how|whether|where|when|why|which|who|whoever|whom|whose|that|those|these|this|there|"
    r"they|them|it|its|he|one|nobody|nothing|something|as|of|if)(\b|_)",
    re.IGNORECASE,
)
"""Words that begin no docstring and no name of a test: a noun or a verb does."""
CODE_BUDGET = {
    "docstrings": 0,
    "docstrings of tests": 0,
    "names of tests": 0,
    "names of tests of more than 60 characters": 0,
    "banned words": 86,
}
"""Most of each in the code. A change that lowers one sets the new number: they only fall."""


def docstrings(tree: ast.AST) -> list[str]:
    """Return the texts of docstrings, those below constants and attributes included."""
    return [
        node.value.value.strip()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def texts(path: Path) -> str:
    """Return the comments and strings of a module."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return "\n".join(
        each.string
        for each in tokens
        if each.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[each.type]
    )


def test_code_stays_within_its_budget() -> None:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in (*SOURCES, *TESTS)}
    starts = {
        path: [each for each in docstrings(tree) if FIRST_WORDS.match(each)]
        for path, tree in trees.items()
    }
    names = [
        node.name
        for path in TESTS
        for node in ast.walk(trees[path])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    found = {
        "docstrings": sum(len(starts[path]) for path in SOURCES),
        "docstrings of tests": sum(len(starts[path]) for path in TESTS),
        "names of tests": sum(bool(FIRST_WORDS.match(name[5:])) for name in names),
        "names of tests of more than 60 characters": sum(len(name) > 60 for name in names),
        "banned words": sum(len(BANNED.findall(texts(path))) for path in SOURCES),
    }
    assert all(found[each] <= most for each, most in CODE_BUDGET.items()), found


RECORDS = sorted((ROOT / "docs/decisions").glob("0*.md"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_record_has_its_form_and_a_row_in_the_index(record: Path) -> None:
    text = read(record)
    title = re.match(r"# \d+\. (.*)\n\n- Status: .+\n- Date: \d{4}-\d\d-\d\d\n", text)
    assert title
    assert len(text.splitlines()) <= 40
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections == ["Context", "Decision", "Consequences", "Alternatives"]
    assert f"[{title[1]}]({record.name})" in read(record.parent / "README.md")


# -- what documents name exists --------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = [t for t in LINK.findall(FENCE.sub("", read(document))) if "://" not in t]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to what does not exist: {missing}"


def anchors(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_fragment_is_a_heading(document: Path) -> None:
    found = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", FENCE.sub("", read(document)))
    wrong = [
        f"{target}#{fragment}"
        for target, fragment in found
        if "://" not in target and (not target or target.endswith(".md"))
        if fragment not in anchors(document.parent / target if target else document)
    ]
    assert not wrong


NO_FILES = re.compile(
    # Hugging Face ids, media types, patterns of names, and files that a user has or makes.
    r"(Qwen|image|video|audio|llm-d\.ai)/.*|.*\.\.\..*|nvidia-.*|"
    r"(stages|choice|topology|zones|mine|endpoints|front|config|cpu-measured)\.(yaml|json|py)|"
    r"(epd_(unix|frugal)_\w+|pyproject)\.(py|toml)"
)


def is_file_of_ours(word: str) -> bool:
    return bool(PATH.fullmatch(word)) and not NO_FILES.fullmatch(word)


def exists(word: str) -> bool:
    """Return whether a path is in the repository, or, as in docs/structures.md, in the package."""
    return any((folder / word).exists() for folder in (ROOT, PACKAGE, ROOT / "docs", ROOT / "ci"))


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.stem)
def test_every_path_in_code_font_exists(document: Path) -> None:
    missing = [
        word
        for span in code_spans(document)
        for word in span.split()
        if is_file_of_ours(word)
        and "/" not in word[:1]
        and not exists(word)
        and word.partition("/")[0] in {path.name for path in ROOT.iterdir()}
    ]
    assert not missing, f"{document.name} names files that do not exist: {missing}"


def test_every_make_target_in_the_pages_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        # After "make" in prose come other words; a target stands at the begin of a command.
        named = [m for line in commands(page) for m in re.findall(r"^ *make ([a-z-]+)", line)]
        assert set(named) <= set(targets), page
        assert page != README or {"demo", "test"} <= set(named)


def command_lines(program: str) -> list[tuple[str, list[str]]]:
    """Return ``(document, arguments)`` of every use of a program in the documents."""
    found = []
    for document in PAGES:
        for line in (*commands(document), *unit_commands(document)):
            in_container = program == "epd-launch" and line.startswith("docker run")
            if not (program in line or in_container) or "…" in line:
                continue
            # An apostrophe of prose, in code font beside a command, is no quote.
            words = shlex.split(line.partition(" | ")[0], comments=True)
            places = [i for i, word in enumerate(words) if Path(word).name == program]
            if words[:2] == ["docker", "run"]:
                # The image's entry point is the program.
                places = [words.index("epd-portable")] if "epd-portable" in words else places
            found += [
                (document.name, list(itertools.takewhile(not_redirected, words[i + 1 :])))
                for i in places
                if words[i + 1 :]
            ]
    return found


def not_redirected(word: str) -> bool:
    return word not in (">", "2>&1", "&&", "||", ";", "&")


def unit_commands(page: Path) -> list[str]:
    """Return what systemd is to start."""
    unit = ROOT / "deploy/systemd/epd.service" if page == DEPLOY else page
    return re.findall(r"^ExecStart=(.*)$", read(unit), re.MULTILINE)


def test_every_command_line_in_the_documents_parses() -> None:
    scripts = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["scripts"]
    assert command_lines("epd-launch"), "the README shows no use of epd-launch"
    for program, target in scripts.items():
        lines = command_lines(program)
        if not lines:
            continue
        module, _, name = target.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        for document, arguments in lines:
            # With --help options are parsed and nothing is done.
            result = CliRunner().invoke(command, [*arguments, "--help"])
            assert result.exit_code == 0, f"{document}: {program} {arguments}: {result.output}"
            for option, value in itertools.pairwise(arguments):
                if (
                    option == "--config"
                    and not value.startswith("/")
                    and value not in ("FILE", "mine.yaml")
                ):
                    assert (ROOT / value).is_file(), f"{document}: {value}"


@pytest.mark.parametrize("cluster", ["kubernetes", "ray", "slurm"])
def test_the_page_of_each_cluster_has_what_its_operator_asks(cluster: str) -> None:
    text = (ROOT / f"docs/{cluster}.md").read_text()
    asked = ["Sizing", "Updating without loss", "Alarms"]
    assert [each for each in asked if not re.search(f"^## {each}$", text, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_shell_blocks_and_python_blocks_are_well_formed(page: Path) -> None:
    for language, block in FENCE.findall(read(page)):
        if language == "python":
            ast.parse(block)
        elif language == "bash" and "…" not in block:
            ended = subprocess.run(
                ["bash", "-n"], input=block, capture_output=True, text=True, check=False
            )
            assert not ended.returncode, f"{page.name}: {ended.stderr}\n{block}"


def test_the_steps_of_two_hosts_are_those_that_the_job_runs() -> None:
    steps = hosts.blocks("Two hosts")
    assert {host for host, _ in steps.values()} == {"both", hosts.FRONTS[0], hosts.SHARED[0]}
    steps = hosts.blocks("Prefill on another host")
    assert {host for host, _ in steps.values()} == {hosts.FRONTS[0], *hosts.SHARED}


# -- alarms and metrics ----------------------------------------------------------------------------


def test_every_alarm_has_its_row_with_its_severity() -> None:
    groups = yaml.safe_load(read(ROOT / "docs/observability/alerts.yaml"))["groups"]
    rules = [(r["alert"], r["labels"]["severity"]) for group in groups for r in group["rules"]]
    rows = re.findall(r"^\| `(Epd\w+)` \| (\w+) \|", read(OPERATIONS), re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(rules) <= set(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    known = set(re.findall(r"^\| `(epd_\w+)` \|", read(METRICS), re.MULTILINE))
    known |= {f"{name}_bucket" for name in known}
    named = set(
        re.findall(r"\bepd_(?:front|front|pd|encode|store)_[a-z_]+\b", " ".join(code_spans(page)))
    )
    named = {name for name in named if not name.endswith("_")}
    assert named <= known | {"epd_encode_prefill", "epd_encode_prefill_decode"}, named - known


def test_every_variable_that_documents_name_exists() -> None:
    known = {variable.name for variable in envs.TABLE}
    for document in PAGES:
        named = set(re.findall(r"\bEPD_[A-Z_]+\b", read(document)))
        assert named <= known, f"{document.name}: {sorted(named - known)}"


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    expected = reference.PAGES[name]()
    assert read(ROOT / f"docs/{name}.md") == expected, "run: python -m ci.reference"


def test_every_key_in_code_font_exists() -> None:
    known = {key for key, *_ in reference.all_keys()}
    # Events of traces look like keys, and so does the name of a log file.
    other = literals_of_calls("trace") | {"front.log"}
    for document in PAGES:
        for span in code_spans(document):
            key = re.sub(r"^instances\.(encode|prefill_decode)\.", "instances.*.", span)
            if KEY.fullmatch(key) and span not in other:
                section = any(name.startswith(f"{span}.") for name in known)
                assert section or {key, span} & known, f"{document.name}: there is no key {span}"


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.stem)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_topology_in_the_documents_is_one(document: Path, platform: str) -> None:
    (name,) = (known for known in PLATFORMS if known == platform)
    for language, block in FENCE.findall(read(document)):
        # Others are of Prometheus, or of llm-d.
        first = next(iter(yaml.safe_load(block))) if language == "yaml" else ""
        if first in (*Topology.model_fields, OVERLAYS):
            whole = block if re.search("^model:", block, re.MULTILINE) else f"model: demo\n{block}"
            parse_topology(whole, name, source=document.name)


# -- what a user meets -----------------------------------------------------------------------------


def literals_of_calls(function: str) -> set[str]:
    """Return the first arguments of every call of a function, where they are literals."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(read(path))):
            if (
                isinstance(node, ast.Call)
                and function in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                found.add(node.args[0].value)
    return found


OTHERS = (
    # Messages of pip, torch, vLLM and Python; parts that the package formats.
    r"No matching distribution|PackageNotFoundError|Failed to load|Free memory on device|is less|"
    r"Error in memory|No space left|No module named|unrecognized arguments|x-request-id|EPD_LOG|"
    r"front\.item_outcomes|do not fit into|bytes of encoder outputs|worker|is not known|"
    r"s \(launch\.hung|s; killing it|transfer\.path 'collective'|not offered|the thread epd-|"
    r"Unsupported Media Type"
)


def texts_of_the_package() -> str:
    """Return all string constants; values within f-strings are NUL."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(found)


def test_help_and_messages_name_no_file_that_the_wheel_lacks() -> None:
    messages = [read(ROOT / "docs/cli.md")]
    for path in PACKAGE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(read(path)))]
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        messages += [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if node not in docstrings
        ]
    assert [text for text in messages if "docs/" in text] == []


def test_messages_in_troubleshooting_are_those_of_the_package() -> None:
    code = texts_of_the_package()
    page = read(TROUBLESHOOTING).partition("## Event traces")[0]
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    unknown = [
        part
        for cell in cells
        for span in CODE.findall(cell)
        for part in (each.strip(" :;,.") for each in re.split(r"…|\d+(?:\.\d+)?|\.\.\.", span))
        if len(part) > 6 and not re.match(OTHERS, part)
        if not re.search(re.escape(part).replace(r"\ ", r"[\s\0]+"), code)
    ]
    assert not unknown, f"docs/troubleshooting.md: no such text in the package: {unknown}"


def test_every_event_of_a_trace_is_explained() -> None:
    section = read(TROUBLESHOOTING).partition("## Event traces")[2]
    first_cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    named = {span for cell in first_cells for span in CODE.findall(cell)}
    assert named == literals_of_calls("trace")


def test_events_of_the_launcher_are_those_of_the_table() -> None:
    _, _, section = read(OPERATIONS).partition("## Events for programs")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    told = sorted(name for row in rows for name in CODE.findall(row))
    assert told == sorted([*typing.get_args(Event), "error"])
