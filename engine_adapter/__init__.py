"""Plugs the tiers into inference engines: llama.cpp through an out-of-tree ggml backend.

README.md beside this file lists the rooms.
"""
