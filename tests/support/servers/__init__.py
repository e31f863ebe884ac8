"""Servers and commands as tests start and ask them."""
