"""A byte source whose reads fail where a plan says so."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.errors import SourceError
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.span import Span


class FaultySource:
    """A `ByteSource` around `inner` that fails as planned.

    The operation `read` fails after half of the bytes came, `verify` when all of them are there, as for a file
    that turns out to have changed.
    """

    def __init__(self, inner: ByteSource, plan: FaultPlan) -> None:
        """Wrap `inner`; nothing fails before `plan` is armed."""
        self._inner = inner
        self._will_need = getattr(inner, "will_need", None)
        self._plan = plan

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Read; or read half, or everything, and fail."""
        error = self._plan.error_for("read", SourceError)
        if error is not None:
            half = span.n_bytes // 2
            self._inner.read_into(Span(span.offset, half), buffer[:half])
            raise error
        self._inner.read_into(span, buffer)
        self._plan.check("verify", SourceError)

    def will_need(self, spans: Sequence[Span]) -> None:
        """Pass the hint on to an `inner` that takes it."""
        if self._will_need is not None:
            self._will_need(spans)
