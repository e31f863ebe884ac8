"""GPUs as devices of the tiers, and the memory of a slab."""
