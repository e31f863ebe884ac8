"""Brings experts into slots and the host pool: on demand, ahead of demand, and in the background."""
