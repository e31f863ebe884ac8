"""The ways in which the model's files are read, by name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class FileMode(StrEnum):
    """How the files are read; the values are the words that a user writes.

    Each file in `tiers/file/modes/` is a member, `page-cache` for `page_cache.py`. Those that our code names are
    written out.
    """

    _ignore_ = "_path"

    AUTO = "auto"
    """One of the other two, by what it measures again and again."""

    PAGE_CACHE = "page-cache"
    """The kernel keeps what was read, in the RAM that nobody else uses."""

    DIRECT = "direct"
    """O_DIRECT: the kernel keeps nothing, and copies nothing."""

    for _path in sorted((Path(__file__).parents[1] / "file" / "modes").glob("[!_]*.py")):
        if _path.stem.upper() not in vars():
            vars()[_path.stem.upper()] = _path.stem.replace("_", "-")

    @property
    def module(self) -> str:
        """The name of the mode's module."""
        return f"expertier.tiers.file.modes.{self.value.replace('-', '_')}"
