"""Expert bytes from the model's files."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence

from expertier.errors import SourceError
from expertier.tiers.file_identity import FileIdentity
from expertier.tiers.model_file import ModelFile


class FileSource:
    """The model's files, opened read-only; a `ByteSource`. Thread-safe: reads carry their offset."""

    def __init__(self, files: Sequence[ModelFile]) -> None:
        """Open `files`; `SourceError` when that fails or one is not the file that its identity describes."""
        self._files = tuple(files)
        self._begins = [file.begin for file in files]
        self._descriptors: list[int] = []
        try:
            for number, file in enumerate(self._files):
                self._descriptors.append(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC))
                change = self._change(number)
                if change is not None:
                    raise SourceError(
                        f"{file.path} changed after its header was read: {change}; read the table again"
                    )
        except OSError as error:
            self.close()
            raise SourceError(
                f"{error.filename} cannot be opened: {error.strerror} (errno {error.errno}); restore the file"
            ) from error
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the model's bytes from `offset`, all of which lie in one file.

        Raises `SourceError` with the path, offset, bytes and cause when not all of them could be read.
        """
        number = max(bisect.bisect_right(self._begins, offset) - 1, 0)
        file = self._files[number]
        offset -= file.begin
        wanted = f"{file.path}: asked for {len(buffer)} bytes at offset {offset}"
        if not self._descriptors:
            raise SourceError(f"{wanted}, but the source was closed; open the tiers again")
        done = 0
        while done < len(buffer):
            try:
                n_read = os.preadv(self._descriptors[number], [buffer[done:]], offset + done)
            except OSError as error:
                change = self._change(number)
                raise SourceError(
                    f"{wanted}, failed after {done}: {error.strerror} (errno {error.errno})"
                    + (f"; {change}" if change else "; check the disk, then try again")
                ) from error
            if n_read == 0:
                change = self._change(number) or "the file ends there"
                raise SourceError(
                    f"{wanted}, got {done} (errno 0): {change}; restore the file and open it again"
                )
            done += n_read

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def _change(self, number: int) -> str | None:
        """Say how a file differs from the one whose header was read."""
        try:
            now = FileIdentity.of(os.fstat(self._descriptors[number]))
        except OSError as error:
            return f"its state cannot be read: {error.strerror}"
        return self._files[number].identity.difference(now)
