"""Error codes that both vendors share."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The results of driver calls that we act on; the numbers are the same for HIP and CUDA."""

    SUCCESS = 0
    OUT_OF_MEMORY = 2
    INVALID_HANDLE = 400
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    CONTEXT_IS_DESTROYED = 709
    NOT_SUPPORTED = 801
