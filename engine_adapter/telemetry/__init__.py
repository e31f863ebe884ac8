"""Reports on the tiers: log lines, metrics, answers to signals."""
