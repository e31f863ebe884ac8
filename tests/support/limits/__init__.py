"""Limits of time, waits that have one, and several jobs at once."""
