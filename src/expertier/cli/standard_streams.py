"""Standard output that raises our error where it cannot be written, and standard error that never ends a command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from expertier.errors import ExpertierError
from expertier.failures import reason, remedy


class StandardOutputError(ExpertierError):
    """The output of a command could not be written."""


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Put guards in the place of both streams for the block, and flush standard output at its end.

    Raises StandardOutputError in the block, where it prints, and at its end.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Output(sys.stdout))
    sys.stderr = cast(TextIO, _Messages(sys.stderr))
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    except BaseException:
        with suppress(StandardOutputError):  # the first error says what was wrong
            sys.stdout.flush()
        raise
    else:
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


class _Stream:
    """A stream that passes everything on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a file's name may not be valid text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def _drop_the_rest(self) -> None:
        """Discard the output that is still buffered, so that flushing at the interpreter's end does not fail again."""
        with suppress(OSError, AttributeError, ValueError):
            assert self._stream is not None
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Output(_Stream):
    def write(self, text: str) -> int:
        """Print. Raises StandardOutputError."""
        if self._stream is None:
            raise _failed(OSError(errno.EBADF, os.strerror(errno.EBADF)))
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop_the_rest()
            raise _failed(error) from error

    def flush(self) -> None:
        """Flush the buffer. Raises StandardOutputError."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            self._drop_the_rest()
            raise _failed(error) from error


class _Messages(_Stream):
    def write(self, text: str) -> int:
        """Print, unless standard error is closed or broken."""
        try:
            return len(text) if self._stream is None else self._stream.write(text)
        except OSError:
            self._drop_the_rest()
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, unless standard error is broken."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError:
            self._drop_the_rest()


def _failed(error: OSError) -> StandardOutputError:
    return StandardOutputError(
        f"not all of the output could be printed to standard output: {reason(error)}; {remedy(error)}"
    )
