"""Experts that are cut into shards for several devices."""
