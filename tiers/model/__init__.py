"""Which bytes of a model's files belong to which expert, and what else the model needs."""
