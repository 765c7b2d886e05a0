"""Activation in a process of this environment, without a variable or an import of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.ascend_sim.tests.runtime import children
from tests.npu_sim.platform.children import nursery, nursery_with_engine


def run(program: str, **variables: str) -> list[str]:
    """Run a program in a fresh process and return its words, less torch_npu's own warnings.

    Nothing of the double is asked for by variable, unless the test does.
    """
    env = {name: value for name, value in os.environ.items() if "ASCEND_SIM" not in name}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("Warning:")]
    return " ".join(lines).split()


LOADED = "import sys; print(*[n in sys.modules for n in ('torch', 'torch_npu', 'ascend_sim.aten')])"


def test_a_plain_process_loads_neither_torch_nor_the_operators() -> None:
    assert run(LOADED) == ["False", "False", "False"]


def test_hooks_import_only_what_python_imports_when_it_starts() -> None:
    import ascend_sim

    program = (
        "import sys; import ascend_sim.hooks;"
        "own = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names;"
        "print(*sorted(own), 'typing' in sys.modules, 're' in sys.modules)"
    )
    result = subprocess.run(
        # Without the environment's .pth files, some of which import a good deal.
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(Path(ascend_sim.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["__main__", "ascend_sim", "False", "False"]


def test_a_process_that_uses_the_cpu_is_left_alone() -> None:
    program = f"import torch; torch.ones(2) + 1; {LOADED}"
    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ["True", "False", "False"]


def test_operators_load_after_a_failed_import_of_the_module() -> None:
    look = "import importlib.util as u; assert u.find_spec('torch_npu');"
    child = f"{look} import torch; {LOADED}; print((torch.ones(2).to('npu') * 3).tolist())"
    program = f"{look} import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run(program) == ["True", "True", "True", "[3.0,", "3.0]"]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Words and counted operators of a process whose variables ask for lateness and counts."""
    log = tmp_path_factory.mktemp("log") / "ops"
    program = (
        "import os, torch, ascend_sim.dispatch as d;"
        f"{LOADED};"
        "torch.ones(2, device='npu').neg().neg(); torch.npu.synchronize();"
        "x = torch.zeros(2).to('npu:0') + 1;"
        "e = torch.npu.Event(); e.record();"
        "print(d.OP_US, e.query(), os.getpid())"
    )
    *words, pid = run(program, ASCEND_SIM_OPLOG=str(log), ASCEND_SIM_OP_US="300000")
    return words, log.with_name(f"ops.{pid}").read_text().splitlines()


def test_operators_are_counted_into_a_file_of_the_process(
    asked: tuple[list[str], list[str]],
) -> None:
    assert "2 aten::neg" in asked[1]


def test_a_variable_makes_operators_late(asked: tuple[list[str], list[str]]) -> None:
    assert asked[0] == ["True", "True", "True", "300000", "False"]


def test_the_double_can_be_left_out() -> None:
    assert children.run_with_torch(LOADED).stdout.split() == ["True", "True", "False"]


def test_compiled_extension_is_replaced_and_maps_device_numbers() -> None:
    program = (
        "import torch, vllm_ascend.vllm_ascend_C as c\n"
        "print(len([n for n in dir(c) if not n.startswith('__')]),"
        "torch.ops._C_ascend.get_physical_device_id(0))\n"
        "torch.ops._C_ascend.device_print('said')\n"
        "torch.ops._C_ascend.device_print_tensor(torch.tensor([7]).to('npu'))"
    )
    env = {**os.environ, "ASCEND_RT_VISIBLE_DEVICES": "1,0"}
    done = nursery_with_engine().finish(program, env, 60)
    assert done.stdout.split() == ["0", "1", "said", "tensor([7])"], done.stderr


def test_atb_is_registered_and_refuses_but_for_what_engines_call() -> None:
    program = """
import torch, torch_npu
from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions
_register_atb_extensions()
x, total = torch.ones(3, 2).to('npu'), torch.ones(2, 2).to('npu')
torch_npu._npu_matmul_add_fp32(x, x, total)
print(total.sum().item())
tokens, cache = torch.ones(2, 1, 8).to('npu'), torch.zeros(2, 4, 1, 8).to('npu')
torch_npu._npu_reshape_and_cache(
    key=tokens, value=tokens, key_cache=cache, value_cache=cache,
    slot_indices=torch.tensor([0, 5], dtype=torch.int32).to('npu'))
print(cache.cpu().sum(dim=(2, 3)).nonzero().tolist() == [[0, 0], [1, 1]])
try:
    torch_npu._npu_paged_attention(x)
except NotImplementedError as error:
    print(error)
"""
    done = nursery().finish(program, os.environ, 60)
    said = done.stdout.split()[:5]
    assert said == ["16.0", "True", "ascend_sim", "does", "not"], done.stderr


@pytest.mark.parametrize(
    "call",
    ["from acl.rt import memcpy as f", "from fla_npu.ops.ascendc import chunk_kda_fwd as f"],
)
def test_stand_ins_can_be_imported_and_not_called(call: str) -> None:
    program = f"{call}\ntry: f(1)\nexcept NotImplementedError as e: print(e)"
    assert run(program)[:4] == ["ascend_sim", "does", "not", "model"]
