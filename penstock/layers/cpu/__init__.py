"""Native CPU kernels of layers."""
