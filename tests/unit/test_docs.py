"""What the documents name exists, and what a user can set or meet is in them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import tomllib
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from epd_portable import envs
from epd_portable.config.load import OVERLAYS, PLATFORMS, parse_topology
from epd_portable.config.schema import (
    LAUNCHER_OWNED_ARGS,
    UNITS,
    InstanceGroup,
    Topology,
)
from epd_portable.router import server
from epd_portable.runners.receiver_metrics import PlacerMetrics, ReceiverMetrics
from epd_portable.runners.sender_metrics import SenderMetrics
from epd_portable.scheduling.admission import AdmissionLimits
from epd_portable.vllm_plugin.admission import AdmissionMiddleware

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "epd_portable"
README = ROOT / "README.md"
STRUCTURES = ROOT / "docs/structures.md"
CONFIGURATION = ROOT / "docs/configuration.md"
METRICS = ROOT / "docs/metrics.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

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


def modules() -> set[str]:
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }


def test_every_module_has_its_line_in_structures() -> None:
    named = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", read(STRUCTURES), re.MULTILINE)
    assert len(named) == len(set(named)), "a module has two lines in docs/structures.md"
    missing, gone = sorted(modules() - set(named)), sorted(set(named) - modules())
    assert not missing, f"give each its line in docs/structures.md: {missing}"
    assert not gone, f"docs/structures.md has lines for what does not exist: {gone}"


def test_the_layers_in_structures_are_those_that_are_checked() -> None:
    contracts = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawn = next(block for _, block in FENCE.findall(read(STRUCTURES)))
    assert drawn.split("\n")[:-1] == layers


# -- what documents name exists --------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = [t for t in LINK.findall(FENCE.sub("", read(document))) if "://" not in t]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to what does not exist: {missing}"


@pytest.mark.parametrize("document", [README, CONFIGURATION, TROUBLESHOOTING])
def test_every_path_in_code_font_exists(document: Path) -> None:
    missing = [
        word
        for span in code_spans(document)
        for word in span.split()
        if PATH.fullmatch(word)
        and not (ROOT / word).exists()
        and "/" not in word[:1]
        # A Hugging Face id has the form of a path.
        and not word.startswith("Qwen/")
    ]
    assert not missing, f"{document.name} names files that do not exist: {missing}"


def test_every_make_target_in_the_readme_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    named = [m for line in commands(README) for m in re.findall(r"\bmake ([a-z-]+)", line)]
    assert "demo" in named and "test" in named
    assert set(named) <= set(targets)


def command_lines(program: str) -> list[tuple[str, list[str]]]:
    """Return ``(document, arguments)`` of every use of a program in the documents."""
    found = []
    for document in (README, CONFIGURATION, TROUBLESHOOTING):
        for line in commands(document):
            words = shlex.split(line, comments=True) if program in line else []
            places = [i for i, word in enumerate(words) if Path(word).name == program]
            found += [(document.name, words[i + 1 :]) for i in places if words[i + 1 :]]
    return found


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
                assert option != "--config" or (ROOT / value).is_file(), f"{document}: {value}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_that_is_run_by_name_exists(document: Path) -> None:
    for name in re.findall(r"python -m (epd_portable[\w.]*)", read(document)):
        assert importlib.util.find_spec(name), name


def test_the_addresses_in_the_readme_are_those_that_are_served() -> None:
    named = {
        span
        for span in code_spans(README)
        if re.fullmatch(r"/(v1/.*|epd/[a-z]+|health|metrics)", span)
    }
    own = {"/health", "/metrics", "/epd/instances"}
    assert named == set(server.WITH_MEDIA) | set(server.TO_ANY_INSTANCE) & named | own
    assert len(named) > len(server.WITH_MEDIA) + len(own)


def test_every_variable_that_documents_name_exists() -> None:
    known = {variable.name for variable in envs.TABLE}
    for document in (README, CONFIGURATION, TROUBLESHOOTING, STRUCTURES):
        named = set(re.findall(r"\bEPD_[A-Z_]+\b", read(document)))
        assert named <= known, f"{document.name}: {sorted(named - known)}"


# -- configuration ---------------------------------------------------------------------------------


def shown_default(name: str, model: type[BaseModel]) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name.endswith("_bytes"):
        unit, size = max(
            ((unit, size) for unit, size in UNITS.items() if value % size == 0),
            key=lambda pair: pair[1],
        )
        return f"`{value // size}{unit}`"
    return f"`{value}`"


def keys(model: type[BaseModel] = Topology, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key that may be written and its default; what all roles have as ``*``."""
    shared = InstanceGroup.model_fields if InstanceGroup in model.__bases__ else ()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            where = "instances.*." if name in shared else prefix
            yield f"{where}{name}", shown_default(name, model)


def test_every_key_of_the_topology_file_is_documented_with_its_default() -> None:
    rows = re.findall(
        r"^\| `([\w.*]+)` \| (required|none|`[^`]+`) \| .+ \|$", read(CONFIGURATION), re.MULTILINE
    )
    documented = {key: default for key, default in rows if not key.startswith("EPD_")}
    assert documented == dict(keys()), "docs/configuration.md and config/schema.py differ"


def test_every_platform_and_every_engine_argument_of_the_launcher_is_documented() -> None:
    text = read(CONFIGURATION)
    assert all(f"`{OVERLAYS}.{name}`" in text for name in PLATFORMS)
    section = text.partition("## Engine arguments")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == LAUNCHER_OWNED_ARGS.keys()


def test_every_variable_of_the_package_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `(EPD_\w+)` \| (\S+) \|", read(CONFIGURATION), re.MULTILINE)
    table = {v.name: f"`{v.default}`" if v.default else "empty" for v in envs.TABLE}
    assert dict(rows) == table


def test_every_key_in_code_font_exists() -> None:
    known = {key for key, _ in keys()}
    # Events of traces look like keys, and so does the name of a log file.
    other = literals_of_calls("trace") | {"router.log"}
    for document in (README, CONFIGURATION, TROUBLESHOOTING, STRUCTURES):
        for span in code_spans(document):
            key = re.sub(r"^instances\.(encode|prefill_decode)\.", "instances.*.", span)
            if KEY.fullmatch(key) and span not in other:
                assert {key, span} & known, f"{document.name}: there is no key {span}"


@pytest.mark.parametrize("document", [README, CONFIGURATION, TROUBLESHOOTING])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_topology_in_the_documents_is_one(document: Path, platform: str) -> None:
    (name,) = (known for known in PLATFORMS if known == platform)
    for language, block in FENCE.findall(read(document)):
        if language == "yaml":
            parse_topology(block, name, source=document.name)


# -- what a user meets -----------------------------------------------------------------------------


def literals_of_calls(function: str) -> set[str]:
    """Return the first arguments of every call of a function, where they are literals."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(read(path))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == function
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                found.add(node.args[0].value)
    return found


def test_every_event_of_a_trace_is_explained() -> None:
    section = read(TROUBLESHOOTING).partition("## Event traces")[2]
    first_cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    named = {span for cell in first_cells for span in CODE.findall(cell)}
    assert named == literals_of_calls("trace")


def test_every_metric_of_an_instance_is_documented_with_its_type_label_and_meaning() -> None:
    made: list[MetricWrapperBase] = []
    for owner in (ReceiverMetrics, PlacerMetrics, SenderMetrics):
        counted = vars(owner(CollectorRegistry())).values()
        made += [metric for metric in counted if isinstance(metric, MetricWrapperBase)]
    rows = re.findall(
        r"^\| `(epd_\w+)` \| (\w+) \| (?:`(\w+)`|–) \| (.+) \|$", read(METRICS), re.MULTILINE
    )
    expected = []
    for metric in made:
        name = f"{metric._name}_total" if metric._type == "counter" else metric._name
        label = metric._labelnames[0] if metric._labelnames else ""
        expected.append((name, metric._type, label, metric._documentation))
    limits = AdmissionLimits(items=1, nbytes=1)
    admission = AdmissionMiddleware(no_app, limits=limits, registry=CollectorRegistry())
    for family in admission.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        label = family.samples[0].labels and next(iter(family.samples[0].labels))
        expected.append((name, family.type, label or "", family.documentation))
    assert sorted(rows) == sorted(expected), "docs/metrics.md and the metrics of instances differ"


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody calls it")


def test_every_metric_of_the_router_is_in_the_readme() -> None:
    counters = {f"{name}_total" for name in literals_of_calls("Counter")}
    others = set().union(*map(literals_of_calls, ("Gauge", "Histogram", "GaugeMetricFamily")))
    rows = re.findall(r"^\| `(epd_router_\w+)` \|", read(README), re.MULTILINE)
    assert set(rows) == {name for name in counters | others if name.startswith("epd_router_")}
