"""Objects that own something of the driver's, and say so when nobody gave it back."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Self


class Owned:
    """Base of the objects that own a driver's resource: closed once, by `close` or at the end of a `with`.

    An object that is dropped while open complains with a `ResourceWarning` and closes itself, except at the
    interpreter's end, when the driver may be gone. Subclasses implement `_release`.
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
        """Wait for what may still use the resource, where nobody else can: before it goes by itself."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __del__(self) -> None:
        """Complain where the object was not closed, and close it."""
        if not self._closed and not sys.is_finalizing():
            try:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1, source=self)
            finally:  # where warnings are errors, too
                self._wait_for_users()
                self.close()
