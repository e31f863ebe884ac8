"""Messages to a user who waits for a download or a compilation."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with one line, without its line break, that says which step begins."""


def silent(message: str) -> None:
    """Say nothing."""
    del message
