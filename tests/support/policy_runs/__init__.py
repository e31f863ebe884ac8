"""Routing played through the policy, and all arrays of its tables."""
