"""The policy's functions as Python, C and compiled code call them."""
