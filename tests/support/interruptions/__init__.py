"""Interrupts at every instruction of a call, and signals to commands."""
