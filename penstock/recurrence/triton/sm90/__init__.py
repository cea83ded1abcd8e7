"""Kernels in Gluon, for sm_90 (Hopper)."""
