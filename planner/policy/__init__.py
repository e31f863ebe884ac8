"""Which expert leaves a slot: tables, the policy's functions, and the policies."""
