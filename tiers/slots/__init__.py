"""L1: the slab, where its slots lie, how they move, and who waits for whom."""
