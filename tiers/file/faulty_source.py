"""A byte source whose reads fail where a `FaultPlan` says so."""

from __future__ import annotations

from collections.abc import Sequence

from expertier.errors import SourceError
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.model.span import Span


class FaultySource:
    """A `ByteSource` that passes reads to `inner` and makes some of them fail, as `plan` says.

    A planned failure of the operation `read` comes after half of the bytes. One of `verify` comes after all bytes, as
    happens with a file that turns out to have changed.
    """

    def __init__(self, inner: ByteSource, plan: FaultPlan) -> None:
        """Wrap `inner`; nothing fails before `plan` is armed."""
        self._inner = inner
        self._will_need = getattr(inner, "will_need", None)
        self._plan = plan

    def read_into(self, span: Span, buffer: memoryview) -> None:
        """Read as `inner` does; where a failure is planned, read half of the bytes or all of them, and raise."""
        error = self._plan.error_for("read", SourceError)
        if error is not None:
            half = span.n_bytes // 2
            self._inner.read_into(Span(span.offset, half), buffer[:half])
            raise error
        self._inner.read_into(span, buffer)
        self._plan.check("verify", SourceError)

    def will_need(self, spans: Sequence[Span]) -> None:
        """Pass the hint on, where `inner` takes hints."""
        if self._will_need is not None:
            self._will_need(spans)
