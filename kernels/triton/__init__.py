"""Triton kernels for NVIDIA GPUs, one file per kernel. To import this package imports nothing, in particular not
Triton."""
