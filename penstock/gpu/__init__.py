"""Shared by the GPU kernels of all families: plans, launches, the target GPU, device functions for tiles, Hopper's descriptors."""
