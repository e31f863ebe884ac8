"""Models with random weights that an engine really runs, and that replay recorded routing."""
