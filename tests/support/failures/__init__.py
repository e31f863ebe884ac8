"""What fails or waits on demand: reads, allocations, places to write to, host memory."""
