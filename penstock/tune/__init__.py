"""Configurations of the GPU kernels: compiling ahead of time, the record of registers and spills, measuring candidates."""
