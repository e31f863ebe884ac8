"""One of the model's files, opened for reading."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from expertier.errors import SourceError
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile

_try_read = os.preadv


class OpenFile:
    """An open file, which may have several descriptors. Reads fail where the file changed after its header was read.

    Thread-safe, except that `close` has to come after all other calls.
    """

    def __init__(self, file: ModelFile) -> None:
        """Open `file` for reads through the page cache. Raises `SourceError` where that fails or the file changed."""
        self.file = file
        self._identity = file.identity
        self._descriptor = -1
        self._descriptor = self._open(0)
        self._judging = threading.Lock()
        self._known_reasons = self._reasons(os.fstat(self._descriptor))
        self._descriptors = [self._descriptor]

    def open_again(self, flags: int) -> int:
        """Open the file once more, with `flags`, and return the descriptor, which `close` closes, too.

        Raises `SourceError` where that fails or the file changed.
        """
        descriptor = self._open(flags)
        self._descriptors.append(descriptor)
        return descriptor

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the file, through the page cache. Raises `SourceError`."""
        descriptor = self._descriptor
        self.fill(
            offset,
            buffer,
            lambda done: os.preadv(descriptor, [buffer[done:] if done else buffer], offset + done),
        )

    def fill(self, offset: int, buffer: memoryview, read: Callable[[int], int]) -> None:
        """Call `read(done)`, which returns how many more bytes came, until the buffer is full.

        Raises `SourceError`, with the `OSError` of `read` as its cause where there was one.
        """
        done, wanted = 0, len(buffer)
        while done < wanted:
            try:
                n_read = read(done)
            except OSError as error:
                change = self._change(self._descriptor)
                raise SourceError(
                    f"{self._asked(offset, buffer)}, failed after {done}: {error.strerror} (errno {error.errno})"
                    + (f"; {change}" if change else "; check the disk, then try again")
                ) from error
            if n_read == 0:
                change = self._change(self._descriptor) or "the file ends there"
                raise SourceError(
                    f"{self._asked(offset, buffer)}, got {done} (errno 0): {change}; restore the file and open it again"
                )
            done += n_read
        # Checked after the read, so that whatever was written before or during it is noticed.
        now = os.fstat(self._descriptor)
        if not self._identity.matches(now) and not self._only_got_another_name_or_rights(now):
            change = self._identity.difference(FileIdentity.of(now))
            raise SourceError(
                f"{self._asked(offset, buffer)}, but the file changed since its header was read: {change}; restore "
                "the file, or open the tiers again"
            )

    def will_need(self, offset: int, n_bytes: int) -> None:
        """Ask the kernel to begin reading these bytes into the page cache; it decides how many it reads.

        Nothing is asked where the cache has the bytes already, because the call would then take a third of a read's
        time. Only the byte in the middle is looked at: the first and the last byte lie in pages that neighbouring bytes
        share, so that these pages may be in the cache without the others.
        """
        if not self._is_cached(offset + n_bytes // 2):
            os.posix_fadvise(self._descriptor, offset, n_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self, offset: int, n_bytes: int) -> None:
        """Ask the kernel to drop these bytes from the page cache."""
        os.posix_fadvise(self._descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close all descriptors; no read may be running."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _is_cached(self, offset: int) -> bool:
        try:
            return _try_read(self._descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: it is not cached; EOPNOTSUPP: the file system cannot tell
            return False

    def _open(self, flags: int) -> int:
        path = self.file.path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            raise SourceError(
                f"{error.filename} cannot be opened: {error.strerror} (errno {error.errno}); restore the file"
            ) from error
        change = self._change(descriptor)
        if change is not None:
            os.close(descriptor)
            raise SourceError(f"{path} changed after its header was read: {change}; read the table again")
        return descriptor

    def _asked(self, offset: int, buffer: memoryview) -> str:
        return f"{self.file.path}: asked for {len(buffer)} bytes at offset {offset}"

    def _change(self, descriptor: int) -> str | None:
        """Return how the file differs from the one whose header was read; None where it is the same."""
        try:
            now = os.fstat(descriptor)
        except OSError as error:
            return f"its state cannot be read: {error.strerror}"
        if descriptor == self._descriptor and self._only_got_another_name_or_rights(now):
            return None
        return self._identity.difference(FileIdentity.of(now))

    def _only_got_another_name_or_rights(self, now: os.stat_result) -> bool:
        """Whether only a name, link, owner or right of the file changed, which sets its `ctime` as writing does.

        Its bytes are then the same, and reads go on. The new state becomes the known one, so that a later change of
        `ctime` again needs such a reason.
        """
        identity = FileIdentity.of(now)
        with self._judging:
            if not self._identity.is_but_for_ctime(identity):
                return False
            if (
                now.st_ctime_ns <= self._identity.ctime_ns
            ):  # another thread judged this change, or a later one
                return True
            reasons = self._reasons(now)
            if reasons == self._known_reasons:
                return False
            self._known_reasons, self._identity = reasons, identity
            return True

    def _reasons(self, now: os.stat_result) -> tuple[object, ...]:
        """Return what can change a file's `ctime` without changing its bytes: links, rights, owner and name."""
        try:
            name = str(Path(f"/proc/self/fd/{self._descriptor}").readlink())
        except OSError:  # without /proc a new name is not noticed, so that it does not count as a reason
            name = ""
        return now.st_nlink, now.st_mode, now.st_uid, now.st_gid, name
