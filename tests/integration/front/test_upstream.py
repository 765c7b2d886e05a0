"""The change of vLLM that is offered: it applies to the release of `make env`."""

from __future__ import annotations

import ast
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

PATCH = Path(__file__).parents[3] / "docs" / "upstream" / "engine-core-client.patch"
MODULE = Path("vllm/v1/engine/async_llm.py")


def test_patch_makes_engine_client_creation_overridable(tmp_path: Path) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    patched = tmp_path / MODULE
    patched.parent.mkdir(parents=True)
    shutil.copyfile(Path(spec.origin).parents[1] / MODULE, patched)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(patched.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert calls.count("self.make_engine_core_client") == 1
    assert calls.count("EngineCoreClient.make_async_mp_client") == 1
