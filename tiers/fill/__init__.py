"""How an expert gets into a slot: on demand, ahead of demand, and in the background."""
