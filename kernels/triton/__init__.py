"""Triton kernels for NVIDIA GPUs, one file per kernel. Importing this package imports nothing, not even Triton."""
