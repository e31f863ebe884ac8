"""Devices whose calls fail on purpose, for tests."""
