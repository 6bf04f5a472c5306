"""Kernels for NVIDIA GPUs, in Triton. Importing this package imports nothing else."""
