"""A vendor's driver: its calls, its memory, its streams, and one GPU of it."""
