"""Consecutive bytes of a model."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """`n_bytes` bytes of a model from `offset` on.

    Offsets count through all files of the model, as if its shards lay one after another (`ModelFile.begin`).
    """

    offset: int
    n_bytes: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.n_bytes
