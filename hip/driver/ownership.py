"""The base class of objects that own a resource of the driver, and warn where it was not given back."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Self

from expertier.errors import DriverError
from expertier.hip.driver.codes import Code
from expertier.hip.driver.gpu import Gpu


class Owned:
    """Base of objects that own a resource of the driver, until `close` or the end of a `with` block.

    An object that is dropped while it is open closes itself and issues a `ResourceWarning`, except at the interpreter's
    end, when the driver may have been unloaded, and after the end of the GPU's context, with which the resource went.
    Subclasses implement `_release`.
    """

    gpu: Gpu
    """The GPU that the resource is of."""

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
        """Close the object where that was not done, and warn, unless it went with the GPU's context."""
        if self._closed or sys.is_finalizing():
            return
        told, is_gone = f"{self!r} was never closed", False
        self._wait_for_users()
        try:
            self.close()
        except DriverError as error:
            is_gone = self._went_with_context(error)
            if not is_gone:
                raise
        finally:
            if not is_gone:
                warnings.warn(told, ResourceWarning, stacklevel=1, source=self)

    def _went_with_context(self, error: DriverError) -> bool:
        """Whether `error`, of giving the resource back, says that it went with the GPU's context before."""
        # CUDA no longer knows the handle of a module then, and says that instead.
        is_unknown = error.code == Code.INVALID_HANDLE and self.gpu.closed
        return error.code == Code.CONTEXT_IS_DESTROYED or is_unknown
