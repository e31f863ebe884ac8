"""Messages to whoever waits for a download or a compilation."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with one line that says what begins now, without a line's end."""


def silent(message: str) -> None:
    """Say nothing."""
    del message
