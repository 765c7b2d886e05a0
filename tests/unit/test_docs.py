"""Documents name existing things only, and all that a user can set or meet."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
import subprocess
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from ci import hosts, reference, suite
from epd_portable import envs
from epd_portable.config.load import OVERLAYS, PLATFORMS, parse_topology
from epd_portable.config.schema import Topology
from epd_portable.launch.notices import Event
from tests.kit.prose import faults_of_prose, semicolons_in_tables
from tests.kit.sources import (
    PACKAGE,
    ROOT,
    docstrings,
    literals_of_calls,
    modules,
    nodes,
    strings,
    text,
)

README = ROOT / "README.md"
OPERATIONS = ROOT / "docs/operations.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
REQUIREMENTS = ROOT / "tests/requirements.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
RECORDS = sorted((ROOT / "docs/decisions").glob("0*.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
"""Pages for users, without records of decisions."""
WRITTEN = [each for each in DOCUMENTS if each.stem not in reference.PAGES]

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
PATH = re.compile(r"\.?[\w-]+(/[\w.-]+)+/?|[\w-]+\.(md|py|yaml|toml)|Makefile")
KEY = re.compile(r"(?:" + "|".join(Topology.model_fields) + r")(?:\.(?:[a-z_]+|\*))+")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_blocks(path: Path) -> str:
    return FENCE.sub("", text(path))


def code_spans(path: Path) -> list[str]:
    """Return the inline code of a document, its fenced blocks left out."""
    return CODE.findall(without_blocks(path))


def commands(path: Path) -> Iterator[str]:
    """Yield command lines: inline code, and lines of shell blocks with continuations joined."""
    yield from code_spans(path)
    for language, block in FENCE.findall(text(path)):
        if language in ("bash", "sh", "console"):
            yield from block.replace("\\\n", " ").splitlines()


def first_cells(path: Path, section: str) -> list[str]:
    part = text(path).partition(f"\n## {section}")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)


# Form of pages.


def test_layers_in_structures_are_those_that_are_checked() -> None:
    contracts = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == ["epd_portable"])
    drawn = next(block for _, block in FENCE.findall(text(ROOT / "docs/structures.md")))
    assert drawn.split("\n")[:-1] == layers


def test_readme_is_short_and_shows_a_command_early() -> None:
    assert len(text(README).splitlines()) <= 150
    assert len(text(README).partition("```bash")[0].split()) <= 200


def test_pages_are_linked_and_name_their_readers() -> None:
    pages = {path for path in PAGES if path.parent != ROOT}
    linked = {target for target, _ in LINK.findall(text(ROOT / "docs/README.md"))}
    assert {path.name for path in pages} - {"README.md"} <= linked
    begin = re.compile(r"# .+\n\nFor \w+")
    assert {path.name for path in pages if not begin.match(text(path))} <= {"transfers.md"}


SEMICOLONS_IN_TABLES = 224
"""Most of them in all pages. A change that removes some sets the new number."""


@pytest.mark.parametrize("document", WRITTEN, ids=name_of)
def test_prose_is_short(document: Path) -> None:
    assert faults_of_prose(text(document)) == []


def test_tables_stay_within_their_budget_of_semicolons() -> None:
    assert sum(semicolons_in_tables(text(each)) for each in WRITTEN) <= SEMICOLONS_IN_TABLES


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_record_has_its_form_and_a_row_in_the_index(record: Path) -> None:
    title = re.match(r"# \d+\. (.*)\n\n- Status: .+\n- Date: \d{4}-\d\d-\d\d\n", text(record))
    assert title
    assert len(text(record).splitlines()) <= 40
    sections = re.findall(r"^## (.*)$", text(record), re.MULTILINE)
    assert sections == ["Context", "Decision", "Consequences", "Alternatives"]
    assert f"[{title[1]}]({record.name})" in text(record.parent / "README.md")


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    expected = reference.PAGES[name]()
    assert text(ROOT / f"docs/{name}.md") == expected, "run: python -m ci.reference"


# Names in documents exist.


def anchors(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, REQUIREMENTS], ids=name_of)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, fragment in LINK.findall(without_blocks(document)):
        page = document.parent / target if target else document
        assert "://" in target or page.exists(), target
        if fragment and page.suffix == ".md" and "://" not in target:
            assert fragment in anchors(page), f"{target}#{fragment}"


NO_FILES = re.compile(
    # Hugging Face ids, media types, patterns of names, and files that a user has or makes.
    r"(Qwen|image|video|audio|llm-d\.ai)/.*|.*\.\.\..*|nvidia-.*|"
    r"(stages|choice|topology|zones|mine|endpoints|front|config|cpu-measured)\.(yaml|json|py)|"
    r"(epd_(unix|frugal)_\w+|pyproject)\.(py|toml)"
)
FOLDERS = (ROOT, PACKAGE, ROOT / "docs", ROOT / "ci")
BEGINS = {each.name for folder in FOLDERS[:2] for each in folder.iterdir()}


@pytest.mark.parametrize("document", [*PAGES, REQUIREMENTS], ids=lambda path: path.stem)
def test_paths_in_code_font_exist(document: Path) -> None:
    words = {word for span in code_spans(document) for word in span.split()}
    paths = {word for word in words if PATH.fullmatch(word) and not NO_FILES.fullmatch(word)}
    missing = {each for each in paths if not any((folder / each).exists() for folder in FOLDERS)}
    assert {each for each in missing if each.partition("/")[0] in BEGINS} == set()


def test_make_targets_in_the_pages_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE)
    targets += [f"test-{suite.short_name(piece.name)}" for piece in suite.pieces(full=False)]
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        # After "make" in prose come other words; a target stands at the begin of a command.
        named = [m for line in commands(page) for m in re.findall(r"^ *make ([a-z-]+)", line)]
        assert set(named) <= set(targets), page
        assert page != README or {"demo", "test"} <= set(named)


ENDS = (">", "2>&1", "&&", "||", ";", "&")


def command_lines(program: str) -> Iterator[tuple[str, list[str]]]:
    """Yield ``(document, arguments)`` of every use of a program in the documents."""
    unit = ROOT / "deploy/systemd/epd.service"
    lines = [(page.name, line) for page in PAGES for line in commands(page)]
    lines += [(unit.name, each) for each in re.findall("^ExecStart=(.*)$", text(unit), re.M)]
    for document, line in lines:
        in_container = program == "epd-launch" and line.startswith("docker run")
        if not (program in line or in_container) or "…" in line:
            continue
        # An apostrophe of prose, in code font next to a command, is no quote.
        words = shlex.split(line.partition(" | ")[0], comments=True)
        # The entry point of the image is the program.
        entry = "epd-portable" if words[:2] == ["docker", "run"] else program
        for place in (i for i, word in enumerate(words[:-1]) if Path(word).name == entry):
            arguments = words[place + 1 :]
            ends = [i for i, word in enumerate(arguments) if word in ENDS]
            yield document, arguments[: min(ends, default=None)]


@pytest.mark.parametrize(
    "program", tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["scripts"].items(), ids=str
)
def test_command_lines_in_the_documents_parse(program: tuple[str, str]) -> None:
    module, _, name = program[1].partition(":")
    command = getattr(importlib.import_module(module), name)
    assert isinstance(command, click.Command)
    lines = [*command_lines(program[0])]
    assert lines
    for document, arguments in lines:
        # With --help options are parsed and nothing is done.
        result = CliRunner().invoke(command, [*arguments, "--help"])
        assert result.exit_code == 0, f"{document}: {program[0]} {arguments}: {result.output}"
        for option, value in itertools.pairwise(arguments):
            if option == "--config" and value not in ("FILE", "mine.yaml") and value[0] != "/":
                assert (ROOT / value).is_file(), f"{document}: {value}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_shell_blocks_and_python_blocks_are_well_formed(page: Path) -> None:
    blocks = FENCE.findall(text(page))
    for block in (block for language, block in blocks if language == "python"):
        ast.parse(block)
    shell = "\n".join(
        block for language, block in blocks if language == "bash" and "…" not in block
    )
    ended = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True, check=False)
    assert not ended.returncode, f"{page.name}: {ended.stderr}\n{shell}"


def test_steps_of_two_hosts_are_those_that_the_job_runs() -> None:
    steps = hosts.blocks("Two hosts")
    assert {host for host, _ in steps.values()} == {"both", hosts.FRONTS[0], hosts.SHARED[0]}
    steps = hosts.blocks("Prefill on another host")
    assert {host for host, _ in steps.values()} == {hosts.FRONTS[0], *hosts.SHARED}


def test_alarms_have_rows_with_their_severity() -> None:
    groups = yaml.safe_load(text(ROOT / "docs/observability/alerts.yaml"))["groups"]
    rules = [(r["alert"], r["labels"]["severity"]) for group in groups for r in group["rules"]]
    rows = re.findall(r"^\| `(Epd\w+)` \| (\w+) \|", text(OPERATIONS), re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(rules) <= set(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_metrics_variables_and_keys_in_pages_exist(page: Path) -> None:
    metrics = {*re.findall(r"^\| `(epd_\w+)` \|", text(ROOT / "docs/metrics.md"), re.MULTILINE)}
    known = metrics | {f"{name}_bucket" for name in metrics}
    # Labels of Pods begin like metrics.
    known |= {"epd_encode_prefill", "epd_encode_prefill_decode"}
    spans = " ".join(code_spans(page))
    named = re.findall(r"\bepd_(?:front|pd|encode|store)_[a-z_]*[a-z]\b", spans)
    assert {*named} <= known
    variables = {variable.name for variable in envs.TABLE}
    assert {*re.findall(r"\bEPD_[A-Z_]+\b", text(page))} <= variables
    keys = {*re.findall(r"^\| `([a-z_.*]+)` \|", text(ROOT / "docs/keys.md"), re.MULTILINE)}
    # Events of traces look like keys, and so does the name of a log file.
    other = literals_of_calls("trace") | {"front.log"}
    for span in {*filter(KEY.fullmatch, code_spans(page))} - other:
        key = re.sub(r"^instances\.(encode|prefill_decode)\.", "instances.*.", span)
        assert {key, span} & keys or any(name.startswith(f"{span}.") for name in keys), span


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.stem)
def test_topologies_in_the_documents_load_on_each_platform(document: Path) -> None:
    for language, block in FENCE.findall(text(document)):
        # Others are of Prometheus, or of llm-d.
        first = next(iter(yaml.safe_load(block))) if language == "yaml" else ""
        if first in (*Topology.model_fields, OVERLAYS):
            whole = block if re.search("^model:", block, re.MULTILINE) else f"model: demo\n{block}"
            for platform in PLATFORMS:
                parse_topology(whole, platform, source=document.name)


def constant(module: str, name: str) -> float:
    """Return a number that a module of the package assigns, without an import of vLLM."""
    for node in nodes(PACKAGE / module):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            names = [ast.unparse(each) for each in getattr(target, "elts", [target])]
            if name in names:
                found = getattr(value, "elts", [value])[names.index(name)]
                return float(eval(ast.unparse(found), {}))
    raise AssertionError(f"{module} has no {name}")


def test_limits_in_the_table_are_constants_of_the_code() -> None:
    section = text(ROOT / "docs/configuration.md").partition("## Fixed limits\n")[2]
    rows = re.findall(r"^\| .+ \| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    module, units = "", {"KiB": 1 << 10, "MiB": 1 << 20}
    for cell, words in rows:
        values = re.findall(r"\b(\d+)( [KM]iB)?", cell)
        shown = {int(number) * units.get(unit.strip(), 1) for number, unit in values}
        assert not shown or words != "–", cell
        for word in words.strip("`–").split():
            if word.endswith(".py"):
                module = word
            else:
                assert constant(module, word) in shown, f"{word}: {cell}"
    assert len(rows) > 20


# Messages and events.

OTHERS = (
    # Messages of pip, torch, vLLM and Python; parts that the package formats.
    r"No matching distribution|PackageNotFoundError|Failed to load|Free memory on device|is less|"
    r"Error in memory|No space left|No module named|unrecognized arguments|x-request-id|EPD_LOG|"
    r"front\.item_outcomes|do not fit into|bytes of encoder outputs|worker|is not known|"
    r"s \(launch\.hung|s; killing it|transfer\.path 'collective'|not offered|the thread epd-|"
    r"Unsupported Media Type"
)


def test_messages_in_troubleshooting_are_those_of_the_package() -> None:
    # Values within f-strings are NUL.
    formatted = (
        "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.JoinedStr)
    )
    plain = (str(each.value) for path in modules() for each in strings(path))
    code = "\n".join((*plain, *formatted))
    page = text(TROUBLESHOOTING).partition("## Event traces")[0]
    unknown = [
        part
        for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
        for span in CODE.findall(cell)
        for part in (each.strip(" :;,.") for each in re.split(r"…|\d+(?:\.\d+)?|\.\.\.", span))
        if len(part) > 6 and not re.match(OTHERS, part)
        if not re.search(re.escape(part).replace(r"\ ", r"[\s\0]+"), code)
    ]
    assert not unknown, f"docs/troubleshooting.md: no such text in the package: {unknown}"


def test_help_and_messages_name_no_file_that_the_wheel_lacks() -> None:
    messages = [text(ROOT / "docs/cli.md")]
    for path in modules():
        texts = (each for each in strings(path) if id(each) not in docstrings(path))
        messages += [str(each.value) for each in texts]
    assert [each for each in messages if "docs/" in each] == []


def test_events_of_traces_and_of_the_launcher_have_rows() -> None:
    cells = " ".join(first_cells(TROUBLESHOOTING, "Event traces"))
    assert {*CODE.findall(cells)} == literals_of_calls("trace")
    cells = " ".join(first_cells(OPERATIONS, "Events for programs"))
    assert sorted(CODE.findall(cells)) == sorted([*typing.get_args(Event), "error"])
