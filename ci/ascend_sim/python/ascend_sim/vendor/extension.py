"""Operators of vllm-ascend's compiled extension, ``torch.ops._C_ascend``."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from ..dispatch import CpuKernel
from ..registration import Namespace
from .norm import add_rms_norm_bias

_SCHEMAS = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, "
    "float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)",
    "device_print(str msg) -> ()",
    "device_print_tensor(Tensor tensor) -> ()",
    "get_physical_device_id(int user_device_id) -> int",
    # Schemas without a kernel: vllm-ascend gives them a shape function when it starts.
    "bgmv_expand(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, int slice_offset, "
    "int slice_size) -> Tensor",
    "sgmv_expand(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, "
    "int slice_offset, int slice_size) -> Tensor",
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index, "
    "int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) "
    "-> (Tensor masked_input, Tensor mask)",
)
_ANY_DEVICE = "CompositeExplicitAutograd"


def register(_: ModuleType) -> None:
    """Define the operators; called once, in place of loading the compiled module."""
    operators = Namespace("_C_ascend", "DEF")
    for schema in _SCHEMAS:
        operators.define(schema)
    name = "npu_add_rms_norm_bias"
    operators.implement(name, CpuKernel(f"_C_ascend::{name}", add_rms_norm_bias))
    operators.implement("device_print", _print, _ANY_DEVICE)
    operators.implement("device_print_tensor", _print_tensor, _ANY_DEVICE)
    operators.implement("get_physical_device_id", _physical_device_id, _ANY_DEVICE)


def _print(msg: str) -> None:
    print(msg, flush=True)


def _print_tensor(tensor: torch.Tensor) -> None:
    print(tensor.cpu(), flush=True)


def _physical_device_id(user_device_id: int) -> int:
    """Return the host's number of a device, of which the process sees those it was given."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return user_device_id if visible is None else int(visible.split(",")[user_device_id])
