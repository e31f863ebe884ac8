"""The engine's side of the tiers: what an engine is told when it binds, and what it may do while it is bound."""
