"""The ways in which the model's files are read."""

from __future__ import annotations

from enum import StrEnum


class FileMode(StrEnum):
    """`auto` picks one of the other two by what it measures (`mode_chooser.py`), again and again."""

    AUTO = "auto"
    PAGE_CACHE = "page-cache"
    """The kernel keeps what was read, in the RAM that nobody else uses."""
    DIRECT = "direct"
    """O_DIRECT: the kernel keeps nothing, and copies nothing."""
