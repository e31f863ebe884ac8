"""Tiers that are bound to the proxy: the structs that C++ reads, and the callbacks through which it calls Python."""
