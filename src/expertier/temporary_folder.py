"""A temporary folder, or an error that says why there is none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from expertier.errors import ConfigError
from expertier.failures import reason, remedy
from expertier.units import mib
from expertier.work_folder import work_folder

_VARIABLES = ("TMPDIR", "TEMP", "TMP")  # as Python reads them


@contextmanager
def temporary_folder(prefix: str, what: str, *, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield a new folder for `what`, which takes `needed_bytes` of disk; it is removed at the end of the block.

    Raises ConfigError where no folder can be made, where the disk has no room, or where the block fails to write there.
    """
    parent = _parent(what)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(work_folder(prefix, parent, is_shared=True))
            free = shutil.disk_usage(parent).free
        except OSError as error:
            raise _cannot(what, parent, error) from error
        if free < needed_bytes:
            raise ConfigError(
                f"{what} takes {mib(needed_bytes)} in the temporary folder {parent}, where {mib(free)} are free: make "
                "room there, or set TMPDIR to a folder on another disk"
            )
        try:
            yield folder
        except OSError as error:
            if not _is_below(error, str(folder)):
                raise
            raise _cannot(what, parent, error) from error


def _parent(what: str) -> Path:
    """Return the folder to make temporary folders in: the one that a variable names, or else the system's."""
    for variable in _VARIABLES:
        named = os.environ.get(variable)
        if named:
            folder = Path(named).absolute()
            if not folder.is_dir():
                raise ConfigError(
                    f"{variable} is {named}, which is no folder, and {what} needs a temporary one: make it, or set "
                    f"{variable} to another"
                )
            return folder
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise ConfigError(
            f"there is no temporary folder for {what}: {reason(error)}; set TMPDIR to a folder that you can write to"
        ) from error


def _is_below(error: OSError, folder: str) -> bool:
    """Whether an error is about a file in the folder; one without a file name comes from an open file."""
    return error.filename is None or str(error.filename).startswith(folder)


def _cannot(what: str, parent: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{what} cannot be written to the temporary folder {parent}: {reason(error)}; {remedy(error)} (TMPDIR)"
    )
