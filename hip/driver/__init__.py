"""A vendor's driver: its calls, its GPUs, and the memory, streams and events that we own."""
