"""Prints the paths of the installed vLLM as JSON, with their methods; none for a websocket."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
from collections.abc import Iterator
from typing import Any, get_args

# Read when vLLM is asked what it serves; there are paths for each.
os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

import vllm.entrypoints
import vllm.tasks
from fastapi import APIRouter
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.api_server import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser


def served() -> Iterator[Any]:
    """Give the routes of a server with everything switched on, for models of every kind."""
    args: argparse.Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--enable-tokenizer-info-endpoint"]
    )
    yield from build_app(args, get_args(vllm.tasks.SupportedTask)).routes
    # What depends on the model, or on a flag.
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if module.name.endswith(".api_router"):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, APIRouter):
                    yield from value.routes


if __name__ == "__main__":
    found = {(route.path, *sorted(getattr(route, "methods", None) or ())) for route in served()}
    print(json.dumps(sorted(found)))
