"""Recorded routing played through the policy, and the offline optimum."""
