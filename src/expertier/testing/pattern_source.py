"""A source whose bytes are computed from their offsets, so that a slot can be checked without a model."""

from __future__ import annotations

import numpy as np

from expertier.tiers.model.span import Span

_WORD = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)


class PatternSource:
    """A `ByteSource` whose byte at each offset is a hash of the offset and the seed; it needs no file."""

    def __init__(self, seed: int = 0) -> None:
        """Choose the pattern."""
        self._seed = np.uint64(seed)

    def expected(self, span: Span) -> bytes:
        """Return the bytes of a span."""
        first = span.offset // _WORD
        words = np.arange(first, -(-span.end // _WORD), dtype=np.uint64)
        mixed = (words + self._seed + np.uint64(1)) * _ODD
        mixed ^= mixed >> np.uint64(29)
        mixed *= _ODD
        start = span.offset - first * _WORD
        return mixed.tobytes()[start : start + span.n_bytes]

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill the buffer with the span's bytes."""
        buffer[:] = self.expected(span)
