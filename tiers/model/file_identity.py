"""Tells whether a file is still the same, unchanged file as before."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file's size, times of change, inode and device.

    A program that writes to a file can set its `mtime` back. No program can set back its `ctime`, which the system
    updates whenever it changes the file's bytes, times, names, owner or rights.
    """

    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """Return the identity in a result of `os.stat`."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)

    def matches(self, stat: os.stat_result) -> bool:
        """Whether a result of `os.stat` shows the same file, unchanged; cheap enough to call at every read."""
        return (
            stat.st_mtime_ns == self.mtime_ns
            and stat.st_size == self.n_bytes
            and stat.st_ino == self.inode
            and stat.st_dev == self.device
            and stat.st_ctime_ns == self.ctime_ns
        )

    def difference(self, now: FileIdentity) -> str | None:
        """Return how `now` differs, as the end of a sentence; None where it is the same file, unchanged."""
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
        """Whether `now` is the same except for its `ctime`, which may differ."""
        return dataclasses.replace(now, ctime_ns=self.ctime_ns) == self
