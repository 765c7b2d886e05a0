"""Operators on the CPU, for torch_npu and vllm-ascend over the simulated Ascend runtime.

The simulated runtime (``../runtime``) has devices, memory, streams and HCCL, but next to no
operators. This package computes them: aten's by torch's own CPU kernels, the vendor's by formulas
taken from the public operator documentation and from the way vllm-ascend calls them. Nothing here
was compared with hardware.

It shows whether a program *calls* the device correctly: shapes, dtypes, devices, the order of
streams, caches and slots. It shows nothing about speed, memory use of kernels, or the rounding of
fused kernels. What it does not model it refuses with :class:`NotImplementedError`.

``hooks`` is imported at the start of every process of the simulation's environment and does
nothing until torch_npu or vllm-ascend is imported.
"""
