"""Turns a caller's stream, a number or another library's object, into the driver's handle."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable


@runtime_checkable
class HasPtr(Protocol):
    """A stream of another library, such as `cupy.cuda.Stream`."""

    @property
    def ptr(self) -> int:
        """The driver's handle."""


StreamLike: TypeAlias = int | HasPtr
"""A driver's handle of a stream, or an object that has it in `ptr`."""


def stream_handle(stream: StreamLike) -> int:
    """Return the driver's handle of a stream. Raises `TypeError` for anything that is no stream."""
    if isinstance(stream, int):
        return stream
    handle = getattr(stream, "ptr", None)
    if not isinstance(handle, int):
        raise TypeError(f"a stream is a number or has one in `ptr`, got {type(stream).__name__}")
    return handle
