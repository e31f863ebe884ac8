"""Tokens a second, predicted from rates and hit rates."""
