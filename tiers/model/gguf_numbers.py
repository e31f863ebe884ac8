"""Reads keys of a GGUF's header that have one number for all blocks, or an array with a number for each block."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType

from expertier.errors import ModelError
from expertier.tiers.model.gguf_header import GgufHeader

_MAX_ITEMS = 1 << 16


def numbers_by_block(path: Path, header: GgufHeader, key: str, n_blocks: int) -> list[int] | None:
    """Return the whole number that `key` gives for each block; None where the file has no such key.

    Booleans count as 0 and 1. Blocks beyond the end of a short array get 0. Raises `ModelError` where the value is
    neither a whole number nor an array of whole numbers.
    """
    value = header.values.get(key)
    if isinstance(value, int):
        return [int(value)] * n_blocks
    if value is not None:
        raise ModelError(f"{path}: {key} is {value!r}; a whole number is needed: convert the model again")
    if key not in header.value_spans:
        return None
    items = _array(path, header, key)[:n_blocks]
    return items + [0] * (n_blocks - len(items))


def _array(path: Path, header: GgufHeader, key: str) -> list[int]:
    """Read an array of whole numbers, which the header's reader skips."""
    begin, end = header.value_spans[key]
    with open(path, "rb") as file:
        file.seek(begin)
        data = file.read(min(end - begin, len(key) + 64 + 8 * _MAX_ITEMS))
    at = 8 + len(key.encode()) + 4
    kind, n_items = struct.unpack_from("<IQ", data, at)
    dtype = GGUFReader.gguf_scalar_to_np.get(GGUFValueType(kind))
    if dtype is None or np.dtype(dtype).kind not in "iub" or n_items > _MAX_ITEMS:
        raise ModelError(
            f"{path}: {key} is an array of {n_items} {GGUFValueType(kind).name}; at most {_MAX_ITEMS} whole numbers "
            "are needed: convert the model again"
        )
    return [int(item) for item in np.frombuffer(data, dtype, n_items, at + 12)]
