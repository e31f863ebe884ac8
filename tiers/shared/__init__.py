"""What several rooms need: counters, the layers' locks, and how much memory there is."""
