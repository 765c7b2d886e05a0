"""Compile an environment to bytecode, by its own Python.

::

    python -m ci.bytecode FOLDER... [--like OTHER]...

Only what engines and tests import: two thirds of it all. From each folder OTHER comes the bytecode
of files that it shares with the first FOLDER: uv makes what it installs of hard links to one copy.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import os
import re
from pathlib import Path

# Not imported at all, or a file or two of hundreds, which Python then compiles.
LEFT_OUT = re.compile(
    r"/tests?/"
    r"|/(transformers|vllm|vllm/model_executor)/models/"
    r"|/(huggingface_hub|transformers)/(cli|exporters|inference|pipelines)/"
    r"|/vllm/(benchmarks|distributed/kv_transfer|tool_parsers)/"
    r"|/(vllm_ascend/(_310p|distributed)|torch_npu/(_inductor|dynamo|testing))/"
    r"|/site-packages/(anthropic|distlib|fontTools|hypercorn|matplotlib|mcp|mypy"
    r"|mypyc|numba|openai|pip|pygments|quart|sentry_sdk|setuptools|torch/testing|virtualenv"
    r"|werkzeug)/"
)


def share(folder: Path, other: Path) -> None:
    """Link the bytecode in ``other`` of files that are the same ones in ``folder``.

    What is out of date among it does no harm: who compiles next or imports looks at the source's
    time in it, and writes a file of its own.
    """
    for source in folder.rglob("*.py"):
        twin = other / source.relative_to(folder)
        bytecode = Path(importlib.util.cache_from_source(str(source)))
        compiled = Path(importlib.util.cache_from_source(str(twin)))
        with contextlib.suppress(OSError):  # There is none, or one is there already.
            if os.path.samefile(source, twin) and compiled.is_file():
                bytecode.parent.mkdir(exist_ok=True)
                os.link(compiled, bytecode)


def main() -> None:
    """Compile what has no bytecode or an old one; pass over what this Python cannot compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--like", action="append", default=[], type=Path)
    options = parser.parse_args()
    for other in options.like:
        share(options.folders[0], other)
    for folder in options.folders:
        compileall.compile_dir(folder, rx=LEFT_OUT, workers=0)


if __name__ == "__main__":
    main()
