"""L3 and L4: the model's files and the ways to read them."""
