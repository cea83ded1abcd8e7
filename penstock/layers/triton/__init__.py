"""Fused Triton kernels of element-wise chains between matrix products, with backward passes."""
