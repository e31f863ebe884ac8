"""Runs of the engine: in this process or in one of their own, with the tiers and without."""
