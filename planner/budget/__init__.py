"""Who gets how much memory: slots, ledgers, devices."""
