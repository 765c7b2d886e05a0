"""Arguments of vLLM: overrides pass on those of later releases, shipped files give known ones."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from epd_portable.config.load import PLATFORMS, load_topology
from epd_portable.config.roles import ROLES

PLUGIN = "epd_portable.vllm_plugin"
FIRST = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SECOND = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
ENCODES = "vllm.v1.worker.mm_encoder_model_runner:MMEncoderModelRunner"
RUNNERS = {
    "epd_portable.runners.first:EncoderRunnerMixin": FIRST,
    "epd_portable.runners.first:PDRunnerMixin": FIRST,
    "epd_portable.runners.second:OrderingSecondRunnerMixin": SECOND,
    "epd_portable.runners.second:EncodeSecondRunnerMixin": ENCODES,
    f"{PLUGIN}.encode_only:EncodeOnlyMixin": SECOND,
}
MANAGER = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager"
MANAGERS = (
    "epd_portable.encode.two_levels:TwoLevelCache",
    "epd_portable.items.encoder_cache:PrefillEncoderCache",
)
MADE_BY_VLLM = (
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase",
)
"""Base classes whose subclasses vLLM constructs."""


def classes() -> Iterator[type]:
    """Yield our classes over those of vLLM, as engines and fronts have them."""
    for each in pkgutil.iter_modules(importlib.import_module(PLUGIN).__path__):
        module = importlib.import_module(f"{PLUGIN}.{each.name}")
        for _, made in inspect.getmembers(module, inspect.isclass):
            if made.__module__ == module.__name__:
                yield made
    for name in ("worker:EPDCPUWorker", "worker:EPDGPUWorker", "executor:EPDExecutor"):
        yield resolve_name(f"{PLUGIN}.{name}")
    scheduler = importlib.import_module(f"{PLUGIN}.scheduler")
    for encodes, asynchronous in ((False, False), (False, True), (True, False)):
        yield scheduler.scheduler_class(
            SimpleNamespace(
                scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
                ec_transfer_config=SimpleNamespace(is_ec_producer=encodes),
            )
        )
    for mixin, runner in RUNNERS.items():
        yield type("Runner", (resolve_name(mixin), resolve_name(runner)), {})


def is_ours(part: type) -> bool:
    return part.__module__.startswith("epd_portable.")


def overrides() -> dict[str, Callable[..., Any]]:
    """Return our functions that vLLM calls in the place of its own, by their names."""
    found = {}
    constructed = tuple(map(resolve_name, MADE_BY_VLLM))
    for made in classes():
        parts = inspect.getmro(made)
        theirs = {
            name for part in parts if part.__module__.startswith("vllm") for name in vars(part)
        }
        for part in filter(is_ours, parts):
            for name, member in vars(part).items():
                function = inspect.unwrap(getattr(member, "__func__", member))
                constructs = name == "__init__" and issubclass(made, constructed)
                named = constructs or not name.startswith("__")
                if named and name in theirs and inspect.isfunction(function):
                    found[f"{part.__module__}:{part.__qualname__}.{name}"] = function
    for path in MANAGERS:
        for name, function in inspect.getmembers(resolve_name(path), inspect.isfunction):
            if not name.startswith("_") and hasattr(resolve_name(MANAGER), name):
                found[f"{path}.{name}"] = function
    return found


def passes_on(function: Callable[..., Any]) -> bool:
    """Tell whether every call of the function that it overrides gets all arguments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"super().{function.__name__}"
    )
    return all("*args, **kwargs" in ast.unparse(call) for call in calls)


def test_overrides_take_and_pass_on_later_arguments() -> None:
    found = overrides()
    assert len(found) > 60, "the overrides of all classes"
    narrow, lossy = [], []
    for name, function in found.items():
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        if not kinds >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            narrow.append(name)
        elif not passes_on(function):
            lossy.append(name)
    assert (narrow, lossy) == ([], [])


def test_scheduler_passes_later_arguments_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call as a later release may make it, through each class over vLLM's."""
    base = resolve_name("vllm.v1.core.sched.scheduler:Scheduler")
    given: list[Any] = []
    monkeypatch.setattr(
        base, "add_request", lambda self, *args, **kwargs: given.append((args, kwargs))
    )
    monkeypatch.setattr(
        base, "__init__", lambda self, *args, **kwargs: given.append((args, kwargs))
    )
    scheduler = importlib.import_module(f"{PLUGIN}.scheduler")
    made = scheduler.scheduler_class(
        SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=False),
            ec_transfer_config=SimpleNamespace(is_ec_producer=True),
        )
    )
    one = made.__new__(made)
    one.ec_connector = SimpleNamespace(request_arrived=lambda request: None)
    one.add_request("request", "second", later=True)
    assert given == [(("request", "second"), {"later": True})]


CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def arguments() -> Iterator[tuple[str, Any]]:
    for path in CONFIGS.glob("*.yaml"):
        for platform in PLATFORMS:
            topology = load_topology(path, platform)
            for group in (topology, *map(topology.instances.of, ROLES)):
                yield from group.engine_args.items()


def test_engine_arguments_of_shipped_files_exist() -> None:
    known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    found = {name for name, _ in arguments()}
    assert {"max_model_len", "kv_cache_memory_bytes"} <= found <= known
