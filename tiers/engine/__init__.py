"""What an engine binds to, and what it does with the tiers while it is bound."""
