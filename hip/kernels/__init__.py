"""Kernels: their sources, each one file for both vendors' compilers, and how they are compiled, cached and loaded."""
