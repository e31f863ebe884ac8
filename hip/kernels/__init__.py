"""Kernel sources: one file for both compilers."""
