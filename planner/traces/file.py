"""Reads recorded routing in each form that we know; a file's first bytes tell which one it is."""

from __future__ import annotations

import io
import os
from pathlib import Path

from expertier.errors import ConfigError
from expertier.planner.traces.archive import read_archive
from expertier.planner.traces.csv_file import parse_csv
from expertier.planner.traces.trace import Trace

_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Return the trace in a file: NumPy's .npz or .npy, or the CSV of a route trace (docs/traces.md).

    Raises ConfigError, which names the file, the line of a text, and what is wrong.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            start = opened.read(6)
            opened.seek(0)
            if start.startswith(_ARCHIVES):
                return read_archive(file, opened)
            if start.startswith(b"blk."):
                raise ConfigError(
                    f"{file}: this is a profile (`blk.<layer> <weight>`), which has no order in time: give a "
                    "recording of routing to replay"
                )
            with io.TextIOWrapper(opened, encoding="utf-8") as text:
                return parse_csv(str(file), text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: neither NumPy's form nor text; give a .npz, a .npy or a CSV of recorded routing"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; give a file of recorded routing") from error
