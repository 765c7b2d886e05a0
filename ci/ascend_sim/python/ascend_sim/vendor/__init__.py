"""Operators of torch_npu and vllm-ascend by their formulas, for tensors of the CPU.

Computed in float32 and rounded once to the result's dtype, where nothing else is stated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .activation import fast_gelu, swiglu
from .attention import fused_infer_attention_score
from .cache import scatter_pa_kv_cache
from .norm import add_rms_norm, rms_norm
from .rotary import mrope, rotary_mul
from .sampling import top_k_top_p

COMPUTED: dict[str, Callable[..., Any]] = {
    "npu_add_rms_norm": add_rms_norm,
    "npu_fast_gelu": fast_gelu,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_mrope": mrope,
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_swiglu": swiglu,
    "npu_top_k_top_p": top_k_top_p,
}
"""Operators of ``torch.ops.npu`` by name, with the arguments of their schemas."""
