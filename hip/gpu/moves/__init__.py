"""Moves and copies of many pieces of memory in few launches or calls."""
