"""What the tiers ask of a place that has the model's bytes."""

from __future__ import annotations

from typing import Protocol


class ByteSource(Protocol):
    """Anything that can fill a buffer from an offset in the model's file; called from several threads."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset`, or raise (`SourceError` by preference)."""
