"""How much memory each consumer gets: sizes of the tiers, slots of each layer, ledgers, blocks of each device."""
