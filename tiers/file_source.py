"""Expert bytes from the model's file."""

from __future__ import annotations

import os
from pathlib import Path

from expertier.errors import SourceError
from expertier.tiers.file_identity import FileIdentity


class FileSource:
    """The model's file, opened read-only; a `ByteSource`. Thread-safe: reads carry their offset."""

    def __init__(self, path: Path, identity: FileIdentity) -> None:
        """Open `path`; `SourceError` when that fails or it is not the file that `identity` describes."""
        self._path = path
        self._identity = identity
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path} cannot be opened: {error.strerror} (errno {error.errno})") from error
        change = self._change()
        if change is not None:
            self.close()
            raise SourceError(f"{path} changed after its header was read: {change}; read the table again")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes from `offset`.

        Raises `SourceError` with the path, offset, bytes and cause when not all of them could be read.
        """
        wanted = f"{self._path}: asked for {len(buffer)} bytes at offset {offset}"
        done = 0
        while done < len(buffer):
            try:
                n_read = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                change = self._change()
                raise SourceError(
                    f"{wanted}, failed after {done}: {error.strerror} (errno {error.errno})"
                    + (f"; {change}" if change else "")
                ) from error
            if n_read == 0:
                change = self._change() or "the file ends there"
                raise SourceError(
                    f"{wanted}, got {done} (errno 0): {change}; restore the file and open it again"
                )
            done += n_read

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _change(self) -> str | None:
        """Say how the file differs from the one whose header was read."""
        if self._descriptor < 0:
            return "the source was closed"
        try:
            return self._identity.difference(FileIdentity.of(os.fstat(self._descriptor)))
        except OSError as error:
            return f"its state cannot be read: {error.strerror}"
