"""Kernels in Triton, for every GPU."""
