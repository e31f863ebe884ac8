"""What is told of the tiers: log lines, metrics, answers to signals."""
