"""What the tiers ask of a place that has the model's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from expertier.tiers.model.span import Span


class ByteSource(Protocol):
    """Anything that can fill a buffer with a piece of the model; called from several threads at once."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer`, of `span.n_bytes` bytes, with the model's bytes of `span`, or raise.

        `SourceError` by preference. The buffer may not be kept after the call.
        """


class HintedSource(ByteSource, Protocol):
    """A source that can begin to read before it is asked for the bytes."""

    def will_need(self, spans: Sequence[Span]) -> None:
        """Take note of what is read next. A hint: raises nothing."""
