"""Leases on experts, and the rule for when the slots may be changed."""
