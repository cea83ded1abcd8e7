"""What every family's GPU kernels share: plans, launching, the GPU they run on, device functions for tiles, Hopper's descriptors."""
