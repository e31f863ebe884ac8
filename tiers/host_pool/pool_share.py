"""What a manager is of a model that several devices share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolShare:
    """The fraction of `model`'s expert bytes that one manager holds.

    `model` is the same object for all of its managers: their pools draw from one budget.
    """

    model: object
    fraction: float
