"""The dashboard and the alert rules: parsed, and every metric and label in them exists."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import promql_parser
import pytest
import yaml

from ci.instruments import of_an_instance, of_the_front, of_the_pool
from epd_portable.config import roles as roles_module
from epd_portable.placement.assignment import FailureKind
from epd_portable.transfer.stores.metrics import Ask, Drop

FOLDER = Path(__file__).resolve().parents[2] / "docs/observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))

ADDED = {"instance", "job"}
"""Labels that Prometheus adds when it reads a page."""
REASONS = ("stop", "length", "abort", "error", "repetition")
"""vLLM's names of ends of requests."""
ENDINGS = ("", "_total", "_bucket", "_sum", "_count")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            # Grafana puts a duration in its place.
            yield target["expr"].replace("$__rate_interval", "5m")
    for rule in rules():
        yield rule["expr"]


EXPRESSIONS = sorted(set(expressions()))


@pytest.fixture(scope="module")
def labels() -> Mapping[str, set[str]]:
    """Return the labels of every metric, by the names under which Prometheus reads them."""
    made = {
        metric._name + ending: {*metric._labelnames, "le"}
        for metric in (*of_an_instance(), *of_the_front())
        for ending in ENDINGS
    }
    for family in of_the_pool():
        made |= {sample.name: set(sample.labels) for sample in family.samples}
    return made | of_vllm() | {"up": set()}  # Prometheus's own, of each target.


def of_vllm() -> dict[str, set[str]]:
    """Return the labels of vLLM's own metrics, from its source."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).with_name("v1").joinpath("metrics/loggers.py").read_text("utf-8")
    found = {}
    for each in source.split('name="')[1:]:
        name, _, rest = each.partition('"')
        more = re.search(r"labelnames=labelnames \+ \[(.*?)\]", rest.partition('name="')[0])
        known = {"model_name", "engine", "le", *re.findall(r"\w+", more[1] if more else "")}
        found |= {name + ending: known for ending in ENDINGS}
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_is_promql_of_metrics_and_labels_that_exist(
    expression: str, labels: Mapping[str, set[str]]
) -> None:
    found = list(selectors(promql_parser.parse(expression)))
    assert found
    for selector in found:
        assert selector.name in labels, f"{selector.name} is counted nowhere"
    known = set().union(*(labels[selector.name] for selector in found)) | ADDED
    for selector in found:
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels[selector.name] | ADDED
    for names in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {name.strip() for name in names.split(",")} <= known


def selectors(node: Any) -> Iterator[Any]:
    """Yield what a parsed expression reads."""
    match type(node).__name__:
        case "VectorSelector":
            yield node
        case "MatrixSelector":
            yield node.vector_selector
        case "BinaryExpr":
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case "AggregateExpr" | "ParenExpr" | "UnaryExpr":
            yield from selectors(node.expr)
        case "Call":
            for argument in node.args:
                yield from selectors(argument)
        case kind:
            assert kind in ("NumberLiteral", "StringLiteral")


def test_a_rule_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} == rule["annotations"].keys()
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))


def test_label_values_in_expressions_are_those_that_are_counted() -> None:
    """A misspelt value would never alert."""
    roles = set(re.findall(r'"([a-z-]+)"', Path(roles_module.__file__).read_text("utf-8")))
    kinds = {kind.value for kind in FailureKind}
    seen = set()
    for rule in rules():
        for selector in selectors(promql_parser.parse(rule["expr"])):
            for matcher in selector.matchers.matchers:
                seen.add(matcher.name)
                for value in matcher.value.split("|"):
                    if matcher.name == "role":
                        assert value in roles
                    elif matcher.name == "finished_reason":
                        assert value in REASONS
                    elif matcher.name == "end":
                        assert value in kinds
                    elif selector.name.startswith("epd_pd_store"):
                        assert value in get_args(Ask)
                    elif selector.name.startswith("epd_encode_store"):
                        assert value in get_args(Drop)
    assert {"role", "finished_reason", "end"} <= seen
