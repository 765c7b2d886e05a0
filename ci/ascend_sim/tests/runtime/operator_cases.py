"""Operators that torch_npu runs in C without PyTorch's dispatcher, each beside its CPU twin.

Run in a child without the double of the operators, so that the runtime itself answers. Each case is
a function of a device; it gives the same tensor on every device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 6, 7
VALUES = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)) * 40
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def _table(device: str) -> torch.Tensor:
    return VALUES.to(device)


def _copied_into_the_middle(device: str) -> torch.Tensor:
    target = torch.zeros(ROWS + 2, COLUMNS + 2, device=device)
    target[1:-1, 1:-1].copy_(_table(device))
    return target


def _column_filled(device: str) -> torch.Tensor:
    table = _table(device)
    table[:, 3].fill_(9)
    return table


def _repeated_row(device: str) -> torch.Tensor:
    return torch.zeros(ROWS, COLUMNS, device=device).copy_(_table(device)[2])


def _joined(device: str) -> torch.Tensor:
    table = _table(device)
    return torch.cat([table, torch.zeros(0, device=device), table[:2]], dim=-2)


def _selected(device: str) -> torch.Tensor:
    rows = torch.tensor([5, 0, 3, 3], dtype=torch.int32).to(device)
    return torch.index_select(_table(device), 0, rows)


CASES: dict[str, Callable[[str], torch.Tensor]] = {
    "zeros": lambda device: torch.zeros(3, 4, device=device),
    "ones": lambda device: torch.ones(3, 4, device=device),
    "fill float16": lambda device: torch.full((3, 4), 2.5, dtype=torch.float16, device=device),
    "fill int64": lambda device: torch.full((3,), 2**53 + 1, dtype=torch.int64, device=device),
    "fill a column": _column_filled,
    "clone": lambda device: _table(device).clone(),
    "transpose": lambda device: _table(device).t().contiguous(),
    "strided to host": lambda device: _table(device)[:, 2:5],
    "into the middle": _copied_into_the_middle,
    "broadcast": _repeated_row,
    "cat rows": _joined,
    "cat columns": lambda device: torch.cat([_table(device), _table(device)], dim=1),
    "index_select": _selected,
    "nothing": lambda device: torch.zeros(0, 4, device=device).clone(),
}
for _dtype in DTYPES:
    CASES[f"cast to {_dtype}"] = lambda device, dtype=_dtype: _table(device).to(dtype)
    CASES[f"cast from {_dtype}"] = lambda device, dtype=_dtype: VALUES.to(dtype).to(device).float()


def main() -> None:
    """Print each case and whether the device gave the CPU's bytes."""
    for name, case in CASES.items():
        try:
            same = torch.equal(case("npu").cpu(), case("cpu"))
        except RuntimeError as error:
            print(f"{name}: {error}".replace("\n", " "))
        else:
            print(f"{name}: {'equal' if same else 'different'}")
    sys.stdout.flush()
