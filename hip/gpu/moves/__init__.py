"""Moves of many pieces of memory with few launches."""
