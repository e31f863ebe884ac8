"""Hypothesis profiles: the default one for `make test`, and `deep` for `make test-deep`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
