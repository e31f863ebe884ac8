"""A model's experts, divided among devices: a table of slices for each of them."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace

from expertier.errors import UnsupportedLayoutError
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.span import Span
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.split.tensor_cut import MatrixSlice, TensorCut, cut_matrix


@dataclass(frozen=True, slots=True)
class SliceRef:
    """One expert's slice of one matrix; `matrix` counts the model's matrices from 0."""

    matrix: int
    expert: int


@dataclass(frozen=True)
class SplitTable:
    """The `whole` table and one of slices for each device, in `parts`.

    A part is a table as any other, for a `TierManager` and its source, but its offsets count through an imagined file
    that has nothing but the device's slices, expert after expert. `slices[device][matrix]` says where they really are.
    """

    whole: ExpertTable
    parts: tuple[ExpertTable, ...]
    slices: tuple[tuple[MatrixSlice, ...], ...]

    @classmethod
    def of(cls, table: ExpertTable, cuts: Mapping[str, TensorCut], n_devices: int) -> SplitTable:
        """Divide every matrix by its cut, found by the tensor's name.

        Raises `UnsupportedLayoutError` where a cut is missing or cannot be (`cut_matrix`).
        """
        ends = [0] * n_devices
        slices: list[list[MatrixSlice]] = [[] for _ in range(n_devices)]
        layers: list[list[ExpertLayer]] = [[] for _ in range(n_devices)]
        for layer in table.layers:
            for matrix in layer.matrices:
                if matrix.name not in cuts:
                    raise UnsupportedLayoutError(
                        f"tensor {matrix.name}: nothing is known of how the engine splits it among devices; use "
                        "--split-mode layer"
                    )
                for device, piece in enumerate(cut_matrix(matrix, cuts[matrix.name], ends)):
                    slices[device].append(piece)
                    ends[device] += layer.n_experts * piece.matrix.expert_bytes
            n_matrices = len(layer.matrices)
            for device in range(n_devices):
                last = slices[device][-n_matrices:]
                layers[device].append(replace(layer, matrices=tuple(piece.matrix for piece in last)))
        parts = tuple(replace(table, layers=tuple(of_device)) for of_device in layers)
        return cls(table, parts, tuple(tuple(of_device) for of_device in slices))

    @property
    def n_devices(self) -> int:
        """How many devices share the model."""
        return len(self.parts)

    def find(self, device: int, span: Span) -> SliceRef:
        """Return which slice a span of the device's imagined file is; `ValueError` for any that is not just one."""
        slices = self.slices[device]
        number = bisect.bisect_right(slices, span.offset, key=lambda piece: piece.matrix.file_offset) - 1
        matrix = slices[number].matrix
        expert, within = divmod(span.offset - matrix.file_offset, matrix.expert_bytes)
        if within or span.n_bytes != matrix.expert_bytes:
            raise ValueError(
                f"asked for {span.n_bytes} bytes, {within} into expert {expert} of {matrix.name}: slices are read "
                f"whole, {matrix.expert_bytes} bytes at once"
            )
        return SliceRef(number, expert)
