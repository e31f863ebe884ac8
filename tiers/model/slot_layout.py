"""How the slots of a layer hold its experts.

There are two forms (D3). Where the block sizes of an expert's matrices have a small common multiple, a slot is one
piece:

    │ gate │ up │ down │ gap │ gate │ up │ down │ gap │ ...  │ guard │
    └─────── slot 0 ─────────┘

and a 3-d tensor with `nb[2]` = slot stride addresses one matrix of all slots. Where the gap would waste more
than 1 % of an expert (some mixes of quantisations), each matrix gets an array of its own, at its own stride:

    │ gate of slot 0 │ gate of slot 1 │ ... │ guard │ up of slot 0 │ ...

The guards stay zero: matrix kernels read up to 512 bytes past the last expert.

Kernels read rows in steps of `KERNEL_STEP` elements. Where a row's length is no multiple of that, as often in a shard
of tensor split, they read past the last row of a matrix. They multiply by zero what they read there. The product is
zero only for finite numbers, so the bytes there have to be blocks of the same type. In an array they always are. In the
one-piece form they are only where the next matrix has the same type and follows without a gap; elsewhere the layer gets
arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from expertier.hip.device import Moves
from expertier.tiers.model.matrix import ExpertMatrix
from expertier.units import round_up

RANGE_ALIGNMENT = 128
"""Ranges and arrays begin at multiples of this many bytes."""

GUARD_BYTES = 512
"""Zeros after the last slot of a range or an array."""

MATRIX_ALIGNMENT = 32
"""A matrix begins at a multiple of this many bytes within a slot or a host block."""

MAX_WASTE = 0.01
"""Largest share of an expert's bytes that a slot's gap may waste."""


KERNEL_STEP = 256
"""How many elements of a row of quantised blocks matrix kernels read at once."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one matrix lies: in slot `i` it begins at byte `offset + i * stride` of the layer's range."""

    offset: int
    stride: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that fills part of a slot: `n_bytes` from an offset in a host block to an offset in the layer's range."""

    source: int
    target: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of one layer's slots and of its experts' copies in host memory.

    A host block has `block_bytes` and holds the matrices of one expert at `block_offsets`. A slot in the one-piece form
    holds them at the same offsets, so that a fill is one copy. `stride` is the distance of two such slots in bytes; 0
    means that each matrix has an array.
    """

    matrix_bytes: tuple[int, ...]
    block_offsets: tuple[int, ...]
    block_bytes: int
    stride: int

    @classmethod
    def of(cls, matrices: Sequence[ExpertMatrix]) -> Self:
        """Choose the form for an expert of these matrices."""
        sizes = tuple(matrix.expert_bytes for matrix in matrices)
        offsets = []
        end = 0
        for size in sizes:
            begin = round_up(end, MATRIX_ALIGNMENT)
            offsets.append(begin)
            end = begin + size
        unit = math.lcm(MATRIX_ALIGNMENT, *(matrix.type_bytes for matrix in matrices))
        stride = round_up(end, unit)
        wasteful = stride - sum(sizes) > MAX_WASTE * sum(sizes)
        needs_arrays = wasteful or not _can_be_read_past(matrices, offsets, stride)
        return cls(sizes, tuple(offsets), end, 0 if needs_arrays else stride)

    @property
    def slot_bytes(self) -> int:
        """The bytes that one more slot takes."""
        return self.stride or sum(self.matrix_bytes)

    @property
    def fixed_bytes(self) -> int:
        """The bytes that a range takes beside its slots, at most: guards and alignment."""
        n_arrays = 1 if self.stride else len(self.matrix_bytes)
        return n_arrays * (GUARD_BYTES + RANGE_ALIGNMENT)

    def range_bytes(self, n_slots: int) -> int:
        """Return the bytes of `n_slots` slots with their guards, a multiple of `RANGE_ALIGNMENT`."""
        if self.stride:
            return _array_bytes(n_slots, self.stride)
        return sum(_array_bytes(n_slots, size) for size in self.matrix_bytes)

    def place(self, n_slots: int) -> tuple[Place, ...]:
        """Return for each matrix where it lies in a range of `n_slots` slots."""
        if self.stride:
            return tuple(Place(offset, self.stride) for offset in self.block_offsets)
        places = []
        begin = 0
        for size in self.matrix_bytes:
            places.append(Place(begin, size))
            begin += _array_bytes(n_slots, size)
        return tuple(places)

    def copies(self, places: Sequence[Place], slot: int) -> tuple[Copy, ...]:
        """Return the copies that fill `slot` from a host block; `places` is what `place` returned for the range."""
        if self.stride:
            return (Copy(0, slot * self.stride, self.block_bytes),)
        return tuple(
            Copy(source, place.offset + slot * place.stride, size)
            for source, place, size in zip(self.block_offsets, places, self.matrix_bytes, strict=True)
        )

    def fills(
        self, places: Sequence[Place], slots: Sequence[int], blocks: Sequence[int], address: int
    ) -> Moves:
        """Return the moves that copy the host block at address `blocks[i]` into slot `slots[i]`, for each i.

        The moves are rows of (target, source, bytes), all rows of a slot together. `address` is where the layer's range
        begins, and `places` is what `place` returned for it.
        """
        if self.stride:
            begin = address + places[0].offset
            return np.array(
                [
                    (begin + slot * self.stride, block, self.block_bytes)
                    for slot, block in zip(slots, blocks, strict=True)
                ],
                np.int64,
            ).reshape(-1, 3)
        return np.array(
            [
                (address + place.offset + slot * place.stride, block + source, size)
                for slot, block in zip(slots, blocks, strict=True)
                for source, place, size in zip(self.block_offsets, places, self.matrix_bytes, strict=True)
            ],
            np.int64,
        ).reshape(-1, 3)


def _can_be_read_past(matrices: Sequence[ExpertMatrix], offsets: Sequence[int], stride: int) -> bool:
    """Whether kernels may read past the end of each matrix in the one-piece form, as the module's docstring says."""
    begins = [*offsets[1:], stride]
    followers = [*matrices[1:], matrices[0]]
    return all(
        not _is_read_past(matrix)
        or (follower.ggml_type == matrix.ggml_type and begin == offset + matrix.expert_bytes)
        for matrix, offset, follower, begin in zip(matrices, offsets, followers, begins, strict=True)
    )


def _is_read_past(matrix: ExpertMatrix) -> bool:
    block_elements = matrix.ne0 * matrix.ne1 * matrix.type_bytes // matrix.expert_bytes
    return block_elements > 1 and matrix.ne0 % KERNEL_STEP != 0


def _array_bytes(n_slots: int, stride: int) -> int:
    return round_up(n_slots * stride + GUARD_BYTES, RANGE_ALIGNMENT)
