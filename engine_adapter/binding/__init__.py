"""Tiers that are bound to the proxy: what C++ reads, and what it asks of Python."""
