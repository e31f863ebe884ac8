"""L2: copies of experts in pinned host memory, under one budget for the whole process."""
