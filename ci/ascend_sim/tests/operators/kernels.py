"""Triton kernels on a simulated device: ``python -m``, with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import json
from types import ModuleType

import torch
import torch_npu  # noqa: F401 - importing it is what adds the device
from ascend_sim import interpreter

installed = ModuleType("vllm.triton_utils.importing")
interpreter.install(installed)

import triton  # noqa: E402 - decorated kernels are those of the interpreter from here on
import triton.language as tl  # noqa: E402
from triton.language.extra.cann import extension  # noqa: E402


@triton.jit
def add_rows(table, sums, rows, COLUMNS: tl.constexpr):
    """Add up tensors whose addresses are in ``table``, a program a column block."""
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for row in range(rows):
        address = tl.load(table + row).to(tl.pointer_type(tl.float32))
        total += tl.load(address + columns)
    tl.store(sums + columns, total)


@triton.jit
def choose(flag, found):
    """Branch by a comparison of scalars, and cut a slice."""
    value = tl.load(flag)
    if (value > 3) and (value != 5):
        tl.store(found, 1)
    part = extension.extract_slice(tl.arange(0, 6), (1,), (2,), (2,))
    tl.store(found + 1 + tl.arange(0, 2), part)


def main() -> None:
    """Print what the kernels have computed."""
    device = "npu:0"
    rows = [torch.arange(3.0, device=device) * scale for scale in (1, 10, 100)]
    table = torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64).to(device)
    sums = torch.zeros(4, device=device)
    add_rows[(1,)](table, sums, 3, COLUMNS=3)
    found = []
    for value in (4, 5):
        out = torch.zeros(3, dtype=torch.int32, device=device)
        choose[(1,)](torch.tensor([value], dtype=torch.int32, device=device), out)
        found.append(out.cpu().tolist())
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device())
    answer = {
        "has_triton": installed.HAS_TRITON,
        "sums": sums.cpu().tolist(),
        "found": found,
        "cores": properties["num_vectorcore"],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
