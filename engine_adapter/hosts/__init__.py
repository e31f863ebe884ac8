"""Programs that run a model through the tiers."""
