"""The protocol of whatever delivers the model's bytes: files, or a test's stand-in for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from expertier.tiers.model.span import Span


class ByteSource(Protocol):
    """Anything that can fill a buffer with a piece of the model. Several threads call it at once."""

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Fill `buffer`, of `span.n_bytes` bytes, with the model's bytes of `span`.

        Raises where it cannot, preferably `SourceError`. It must not use the buffer after the call.
        """


class HintedSource(ByteSource, Protocol):
    """A source that can begin to read before it is asked for the bytes."""

    def will_need(self, spans: Sequence[Span]) -> None:
        """Prepare for reads of `spans`, which come next. This is only a hint, so it raises nothing."""
