"""Who holds experts now, and who may change the slots."""
