"""Messages about failures of the machine, such as no room, no permission or no memory, that say what to do."""

from __future__ import annotations

import errno
import os

_NO_ROOM = "free some space there, or give a place on another disk"
_NOT_ALLOWED = "give a place that you can write to, or another user's rights"
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "the limit of a file's size is below it (ulimit -f): raise that, or give another place",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: "nothing can be written there: give another place",
    errno.ENOENT: "check the name, and make the folder where that is missing",
    errno.ENOTDIR: "a part of the name is a file and no folder: check the name",
    errno.EISDIR: "that is a folder: give the name of a file",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "too many files are open (ulimit -n): raise the limit",
    errno.ENOMEM: "the machine is short of memory: free some, or ask for less",
    errno.EIO: "check the disk, then try again",
    errno.EPIPE: "the program that read it has ended: read to the end, or write to a file",
    errno.EBADF: "it is closed: leave it open, or write to a file",
}


def reason(error: BaseException) -> str:
    """Return what the system said, without the name of the file."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error) or type(error).__name__


def remedy(error: BaseException) -> str:
    """Return what to do about it."""
    if isinstance(error, MemoryError):
        return "free some memory, or ask for less"
    number = error.errno if isinstance(error, OSError) else None
    return _REMEDIES.get(number or 0, "check the place, then try again")


def explain(error: OSError | MemoryError) -> str:
    """Return a message for an error that no caller has put into words."""
    if isinstance(error, MemoryError):
        return (
            "this process got no more memory from the system: free some memory, or use smaller budgets "
            "(--expert-cache-mib, --host-pool-mib) or a shorter --ctx" + (f" ({error})" if str(error) else "")
        )
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where = " and ".join(names) or "a file or a pipe"
    return f"{where} cannot be used: {reason(error)}; {remedy(error)}"
