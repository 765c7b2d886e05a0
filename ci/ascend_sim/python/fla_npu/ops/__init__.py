"""Stands for fla_npu, kernels of linear-attention models, where it is imported and not used."""
