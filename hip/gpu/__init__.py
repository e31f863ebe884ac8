"""A GPU as a device of the tiers."""
