"""What the tiers ask of a place that has the model's bytes."""

from __future__ import annotations

from typing import Protocol

from expertier.tiers.span import Span


class ByteSource(Protocol):
    """Anything that can fill a buffer with a piece of the model; called from several threads at once."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer`, of `span.n_bytes` bytes, with the model's bytes of `span`, or raise.

        `SourceError` by preference. The buffer may not be kept after the call.
        """
