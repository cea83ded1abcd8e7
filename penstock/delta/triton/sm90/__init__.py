"""Kernels of the delta family for Hopper, in Gluon: device code only."""
