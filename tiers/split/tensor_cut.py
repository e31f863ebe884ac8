"""How one expert matrix is divided among devices, and where a device's shard lies in it.

    rows of an expert      axis 1: full rows               axis 0: a piece of every row
    ┌────────────────┐     ┌────────────────┐ device 0     ┌────────┬───────┐
    │                │     ├────────────────┤              │device 0│   1   │
    └────────────────┘     └────────────────┘ device 1     └────────┴───────┘

A shard holds its pieces one after another, in the order of the file, as ggml lays it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from expertier.errors import UnsupportedLayoutError
from expertier.tiers.model.matrix import ExpertMatrix

Range = tuple[int, int]

_WITHIN_ROWS, _BETWEEN_ROWS = 0, 1


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How a tensor is divided: `ranges[device]` has the [begin, end) of the device's elements along `axis`.

    Axis 0 cuts every row into pieces, and axis 1 gives each device full rows; None gives every device the full tensor.
    """

    axis: int | None
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def mirrored(cls, n_devices: int) -> Self:
        """Return the cut that gives every device the full tensor."""
        return cls(None, ((),) * n_devices)

    @classmethod
    def of_segments(cls, axis: int, segments: Sequence[tuple[int, Sequence[int]]]) -> Self:
        """Return a cut made of segments along `axis`, each of them (number of repeats, elements for each device)."""
        ranges: list[list[Range]] = [[] for _ in segments[0][1]]
        at = 0
        for repeats, counts in segments:
            for _ in range(repeats):
                for device, n in enumerate(counts):
                    if n:
                        ranges[device].append((at, at + n))
                    at += n
        return cls(axis, tuple(tuple(of_device) for of_device in ranges))


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One device's shard of the matrix `full`; `matrix` describes the shard as if it were a matrix of its own.

    An expert's bytes in the file form `n_rows` rows, and of each row the shard has the `columns`: [begin, end) in
    bytes.
    """

    full: ExpertMatrix
    matrix: ExpertMatrix
    n_rows: int
    columns: tuple[Range, ...]

    def gather(self, full: npt.NDArray[np.uint8], shard: npt.NDArray[np.uint8]) -> None:
        """Copy the shard out of `full`, one expert's bytes, into `shard`. Both arrays are one-dimensional."""
        source = full.reshape(self.n_rows, -1)
        target = shard.reshape(self.n_rows, -1)
        at = 0
        for begin, end in self.columns:
            target[:, at : at + end - begin] = source[:, begin:end]
            at += end - begin


def cut_matrix(matrix: ExpertMatrix, cut: TensorCut, offsets: Sequence[int]) -> tuple[TensorShard, ...]:
    """Return the shard of each device; `offsets` has for each device where its shard of expert 0 shall lie.

    Raises `UnsupportedLayoutError` where a device would get nothing, or a piece that ends inside a block of quantised
    elements, or where the cut does not fit the matrix.
    """
    if cut.axis is None:
        everything = ((0, matrix.expert_bytes),)
        return tuple(
            TensorShard(matrix, replace(matrix, file_offset=offset), 1, everything) for offset in offsets
        )
    if cut.axis not in (_WITHIN_ROWS, _BETWEEN_ROWS):
        raise UnsupportedLayoutError(
            f"tensor {matrix.name}: the engine splits it along axis {cut.axis}, between experts; slots hold shards "
            "along axis 0 or 1 only: use --split-mode layer"
        )
    n_along = matrix.ne0 if cut.axis == _WITHIN_ROWS else matrix.ne1
    in_file_order = sorted(piece for pieces in cut.ranges for piece in pieces)
    ends = [0, *(end for _, end in in_file_order)]
    assert [begin for begin, _ in in_file_order] == ends[:-1], f"{matrix.name}: pieces {in_file_order}"
    if ends[-1] != n_along:
        raise UnsupportedLayoutError(
            f"tensor {matrix.name}: the engine splits {ends[-1]} elements along axis {cut.axis}, but the file's "
            f"tensor has {n_along}: use --split-mode layer"
        )
    return tuple(
        _shard(matrix, cut.axis, device, pieces, offset)
        for device, (pieces, offset) in enumerate(zip(cut.ranges, offsets, strict=True))
    )


def _shard(
    matrix: ExpertMatrix, axis: int, device: int, pieces: tuple[Range, ...], offset: int
) -> TensorShard:
    n = sum(end - begin for begin, end in pieces)
    if not n:
        what = "row" if axis == _BETWEEN_ROWS else "element"
        raise UnsupportedLayoutError(
            f"tensor {matrix.name} of {matrix.ne0} by {matrix.ne1}: device {device} of the tensor split would get no "
            f"{what} of it, as the engine splits in units of 128 elements or more: use fewer devices, more equal "
            "shares (--tensor-split), or --split-mode layer"
        )
    row_bytes = matrix.expert_bytes // matrix.ne1
    if axis == _BETWEEN_ROWS:
        return TensorShard(
            matrix,
            replace(matrix, ne1=n, expert_bytes=n * row_bytes, file_offset=offset),
            1,
            tuple((begin * row_bytes, end * row_bytes) for begin, end in pieces),
        )
    block = matrix.ne0 * matrix.type_bytes // row_bytes
    for edge in (edge for piece in pieces for edge in piece):
        if edge % block:
            raise UnsupportedLayoutError(
                f"tensor {matrix.name}: the engine cuts its rows of {matrix.ne0} elements at {edge} for device "
                f"{device}, inside of a block of {block} quantised elements: such a shard has no bytes of its own; "
                "use --split-mode layer, or a file whose matrices of a layer have types of one block size"
            )
    columns = tuple(
        (begin // block * matrix.type_bytes, end // block * matrix.type_bytes) for begin, end in pieces
    )
    n_bytes = sum(end - begin for begin, end in columns)
    return TensorShard(
        matrix,
        replace(matrix, ne0=n, expert_bytes=n_bytes * matrix.ne1, file_offset=offset),
        matrix.ne1,
        columns,
    )
