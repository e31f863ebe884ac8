"""Calls of a device that fail on purpose."""
