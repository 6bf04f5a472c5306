"""C++ kernels for CPUs: sources in csrc/, compiled on first use (build), called through ctypes (library)."""
