"""The operators that the runtime has itself, and its answer to all others; without the double."""

from __future__ import annotations

import pytest

from ci.ascend_sim.tests.runtime import acl, children

BLOCKING = {"ASCEND_LAUNCH_BLOCKING": "1"}
"""torch_npu runs each operator at its call, so its failure is raised there."""


def test_operators_in_c_give_the_same_bytes_as_the_cpu() -> None:
    code = "from ci.ascend_sim.tests.runtime import operator_cases; operator_cases.main()"

    results = dict(
        line.split(": ", 1)
        for line in children.printed(children.run_with_torch(code, **BLOCKING)).splitlines()
        if ": " in line
    )

    wrong = {name: said for name, said in results.items() if said != "equal" and name != "Warning"}
    assert not wrong
    assert len(results) > 30


def test_an_operator_that_is_not_simulated_is_refused_by_name() -> None:
    code = """
import torch, torch_npu
try:
    torch.ones(3, device="npu") + 1
except RuntimeError as error:
    print("refused:", "operator Add is not simulated" in str(error))
"""

    assert "refused: True" in children.printed(children.run_with_torch(code, **BLOCKING))


def test_with_the_task_queue_a_refusal_is_printed_at_once() -> None:
    code = """
import os, torch, torch_npu
torch.ones(3, device="npu").add_(1)
try:
    torch.npu.synchronize()
except RuntimeError:
    pass
"""

    assert "ascend_sim: operator Add is not simulated" in children.run_with_torch(code).stderr


def test_an_index_outside_of_its_table_is_an_error() -> None:
    code = """
import torch, torch_npu
rows = torch.tensor([1, 6]).npu()
try:
    torch.index_select(torch.zeros(6, 2).npu(), 0, rows)
    torch.npu.synchronize()
except RuntimeError as error:
    print("refused:", "index 6 of 6 rows" in str(error))
"""

    assert "refused: True" in children.printed(children.run_with_torch(code, **BLOCKING))


@pytest.mark.parametrize("function", ["rtKernelLaunch", "aclrtProcessReport"])
def test_operator_without_simulation_is_an_error(function: str) -> None:
    assert acl.code_of(function, 0) != acl.SUCCESS
    assert "not simulated" in acl.message()
