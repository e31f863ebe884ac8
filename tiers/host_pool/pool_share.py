"""Which part of a model one manager holds, where several devices share the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolShare:
    """The `fraction` of a model's expert bytes that one manager holds.

    `model` is the same object for all managers of the model, so that the host budget adds their pools' claims.
    """

    model: object
    fraction: float
