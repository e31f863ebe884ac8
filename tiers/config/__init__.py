"""How a user sizes the tiers: the `MOE_` variables, the modes, and the budgets that follow from them."""
