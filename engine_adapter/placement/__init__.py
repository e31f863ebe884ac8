"""Which devices a model lies on, and how many of its blocks on each."""
