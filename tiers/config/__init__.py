"""How a user sizes the tiers: variables, modes, and what follows from them."""
