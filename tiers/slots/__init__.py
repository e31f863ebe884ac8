"""L1: the slab, where its slots lie, how they move, and which queued work waits for which."""
