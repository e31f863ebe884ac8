"""Routing profiles: how a model's routing spreads over layers and experts."""
