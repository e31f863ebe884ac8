"""The base class of objects that own a resource of the driver, and warn where it was not given back."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Self


class Owned:
    """Base of objects that own a resource of the driver, until `close` or the end of a `with` block.

    An object that is dropped while it is open issues a `ResourceWarning` and closes itself, except at the interpreter's
    end, when the driver may have been unloaded. Subclasses implement `_release`.
    """

    _closed = True  # until the constructor has something to give back

    @property
    def closed(self) -> bool:
        """Whether the resource was given back."""
        return self._closed

    def close(self) -> None:
        """Give the resource back; a second call does nothing. Raises `DriverError`."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        raise NotImplementedError

    def _wait_for_users(self) -> None:
        """Wait for work that may still use the resource; called where the object is dropped without `close`."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the object."""
        self.close()

    def __del__(self) -> None:
        """Warn where the object was not closed, and close it."""
        if not self._closed and not sys.is_finalizing():
            try:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1, source=self)
            finally:  # also where warnings are errors
                self._wait_for_users()
                self.close()
