"""What tells whether a file is still the one that was looked at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file's size, time of change, inode and device."""

    n_bytes: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """Take it from what `os.stat` returned."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev)

    def matches(self, stat: os.stat_result) -> bool:
        """Tell whether `os.stat` saw the same file, unchanged; cheap enough for every read."""
        return (
            stat.st_mtime_ns == self.mtime_ns
            and stat.st_size == self.n_bytes
            and stat.st_ino == self.inode
            and stat.st_dev == self.device
        )

    def difference(self, now: FileIdentity) -> str | None:
        """Say how `now` differs; None when it is the same file, unchanged."""
        if now.n_bytes != self.n_bytes:
            return f"its size was {self.n_bytes} bytes and is {now.n_bytes}"
        if (now.inode, now.device) != (self.inode, self.device):
            return "another file took its place"
        if now.mtime_ns != self.mtime_ns:
            return "it was written to"
        return None
