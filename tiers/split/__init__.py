"""Experts that are cut up for several devices."""
