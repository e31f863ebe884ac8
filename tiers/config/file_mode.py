"""The ways in which the model's files are read, by name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class FileMode(StrEnum):
    """How the files are read; the values are the words that a user writes.

    Each file in `tiers/file/modes/` makes a member: `page_cache.py` makes `page-cache`. The members that our own code
    names are written out below; the loop adds the members of all other files.
    """

    _ignore_ = "_path"

    AUTO = "auto"
    """`page-cache` or `direct`, whichever is faster; both are measured again and again."""

    PAGE_CACHE = "page-cache"
    """Ordinary reads: the kernel keeps what was read in RAM that no process uses."""

    DIRECT = "direct"
    """Reads with O_DIRECT: the kernel neither keeps the bytes nor copies them."""

    for _path in sorted((Path(__file__).parents[1] / "file" / "modes").glob("[!_]*.py")):
        if _path.stem.upper() not in vars():
            vars()[_path.stem.upper()] = _path.stem.replace("_", "-")

    @property
    def module(self) -> str:
        """The full name of the module that reads in this mode."""
        return f"expertier.tiers.file.modes.{self.value.replace('-', '_')}"
