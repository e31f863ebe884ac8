"""Recorded routing: in memory, in files, and recorded from a live run."""
