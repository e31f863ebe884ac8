"""Finds the first tensor in which two runs differ, from the files that contexts write (`llama_host/tensors.h`)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_LENGTH = struct.Struct("<i")
_HEAD = struct.Struct("<i4q")


class Computed(NamedTuple):
    """One tensor: its name, its dimensions as ggml gives them, and its values."""

    name: str
    ne: tuple[int, ...]
    values: npt.NDArray[np.float32]


def read_tensors(path: Path) -> Iterator[Computed]:
    """Yield what was computed, in order; the values are a view of the file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            name = data[at : at + length].decode()
            at += length
            _, *ne = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            n_values = int(np.prod(ne))
            yield Computed(name, tuple(ne), np.frombuffer(data[at : at + 4 * n_values], np.float32))
            at += 4 * n_values


def _named(path: Path) -> Iterator[Computed]:
    return (each for each in read_tensors(path) if not each.name.startswith("node_") and "(" not in each.name)


def first_difference(stock: Path, ours: Path) -> dict[str, Any]:
    """Compare two files; returns the first tensor that differs and by how much, and how many were equal before it.

    It compares only tensors that the model names: some of the unnamed tensors are made of memory that was never filled,
    and are never read.
    """
    equal = 0
    graphs = 1
    for one, other in zip_longest(_named(stock), _named(ours)):
        if one is None or other is None or (one.name, one.ne) != (other.name, other.ne):
            names = [f"{each.name} {each.ne}" if each else "nothing" for each in (one, other)]
            return {"tensor": None, "equal_before": equal, "unlike": names}
        if one.values.tobytes() != other.values.tobytes():
            apart = np.abs(one.values - other.values)
            return {
                "tensor": one.name,
                "ne": one.ne,
                "graph": graphs,
                "equal_before": equal,
                "differing_values": int(
                    np.count_nonzero(one.values.view(np.int32) != other.values.view(np.int32))
                ),
                "values": len(apart),
                "max_difference": float(apart.max()),
                "mean_magnitude": float(np.abs(one.values).mean()),
            }
        equal += 1
        graphs += one.name == "result_output"
    return {"tensor": None, "equal_before": equal}
