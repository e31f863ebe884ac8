"""What tells whether a file is still the one that was looked at."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file's size, times of change, inode and device.

    Whoever writes to a file may put its `mtime` back. Nobody can put back its `ctime`, the time at which the system
    last changed anything about it: bytes, times, names, owner or rights.
    """

    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """Take it from what `os.stat` returned."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)

    def matches(self, stat: os.stat_result) -> bool:
        """Tell whether `os.stat` saw the same file, unchanged; cheap enough for every read."""
        return (
            stat.st_mtime_ns == self.mtime_ns
            and stat.st_size == self.n_bytes
            and stat.st_ino == self.inode
            and stat.st_dev == self.device
            and stat.st_ctime_ns == self.ctime_ns
        )

    def difference(self, now: FileIdentity) -> str | None:
        """Say how `now` differs; None when it is the same file, unchanged."""
        if now.n_bytes != self.n_bytes:
            return f"its size was {self.n_bytes} bytes and is {now.n_bytes}"
        if (now.inode, now.device) != (self.inode, self.device):
            return "another file took its place"
        if now.mtime_ns != self.mtime_ns:
            return "it was written to"
        if now.ctime_ns != self.ctime_ns:
            return (
                "its time of writing is what it was, but something changed it since (ctime): it was written to and the "
                "time put back, or its times, name or rights were set"
            )
        return None

    def is_but_for_ctime(self, now: FileIdentity) -> bool:
        """Whether `now` differs in nothing else than perhaps the time at which the system last changed it."""
        return dataclasses.replace(now, ctime_ns=self.ctime_ns) == self
