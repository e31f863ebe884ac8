"""What a `with` block does at its end with an object that may refuse to be closed."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from expertier.errors import BusyError
from expertier.interrupts import not_interrupted_at_entry


class ClosedByWith:
    """Base of what is closed at the end of a `with` block; `close` raises `BusyError` while it is in use."""

    def close(self) -> None:
        """Free everything; a second call does nothing. Raises `BusyError` while it is in use."""
        raise NotImplementedError

    @not_interrupted_at_entry
    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    @not_interrupted_at_entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the object. Where that raises `BusyError` and the block has raised an error, that error gets a note."""
        try:
            self.close()
        except BusyError as busy:
            if error is None:
                raise
            error.add_note(f"the tiers stay allocated: {busy}")
