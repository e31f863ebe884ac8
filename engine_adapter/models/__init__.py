"""Models with random weights that an engine can run, and models that replay recorded routing."""
