"""The tables of known fields against the request models of the installed engine."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from epd_portable.router import fields


def engine_fields(module: str, name: str) -> set[str]:
    """Read the fields from the source: importing it would import torch."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "entrypoints" / "openai" / module / "protocol.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            declared = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            names = {target.id for target in declared if isinstance(target, ast.Name)}
            return {field for field in names if not field.startswith("_")}
    raise AssertionError(f"{source} has no class {name}")


@pytest.mark.needs_vllm
def test_the_known_chat_fields_are_those_of_the_engine() -> None:
    known = engine_fields("chat_completion", "ChatCompletionRequest")
    assert known == fields.CHAT_ENGINE | fields.STRIPPED


@pytest.mark.needs_vllm
def test_the_known_completion_fields_are_those_of_the_engine() -> None:
    assert engine_fields("completion", "CompletionRequest") == fields.COMPLETION | fields.STRIPPED


def test_openais_fields_without_effect_are_accepted() -> None:
    fields.check_names(fields.CHAT_WITHOUT_EFFECT, fields.CHAT)
