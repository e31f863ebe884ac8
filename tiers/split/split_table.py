"""A model's experts, divided among devices: a table of shards for each device."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace

from expertier.errors import UnsupportedLayoutError
from expertier.tiers.model.layer import ExpertLayer
from expertier.tiers.model.span import Span
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.split.tensor_cut import TensorCut, TensorShard, cut_matrix


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One expert's shard of one matrix; `matrix` is a number that counts all expert matrices of the model from 0."""

    matrix: int
    expert: int


@dataclass(frozen=True)
class SplitTable:
    """The model's `full_table`, and in `tables` one table of tensor shards for each device.

    A device's table serves a `TierManager` and its source as any table does. But its offsets count through an imagined
    file, which holds only the device's shards, expert after expert. `shards[device][matrix]` says where these shards
    lie in the model's files.
    """

    full_table: ExpertTable
    tables: tuple[ExpertTable, ...]
    shards: tuple[tuple[TensorShard, ...], ...]

    @classmethod
    def of(cls, table: ExpertTable, cuts: Mapping[str, TensorCut], n_devices: int) -> SplitTable:
        """Divide every matrix of `table`; `cuts` has the cut of each by the tensor's name.

        Raises `UnsupportedLayoutError` where a cut is missing or impossible (`cut_matrix`).
        """
        ends = [0] * n_devices
        shards: list[list[TensorShard]] = [[] for _ in range(n_devices)]
        layers: list[list[ExpertLayer]] = [[] for _ in range(n_devices)]
        for layer in table.layers:
            for matrix in layer.matrices:
                if matrix.name not in cuts:
                    raise UnsupportedLayoutError(
                        f"tensor {matrix.name}: it is not known how the engine splits it among devices; use "
                        "--split-mode layer"
                    )
                for device, piece in enumerate(cut_matrix(matrix, cuts[matrix.name], ends)):
                    shards[device].append(piece)
                    ends[device] += layer.n_experts * piece.matrix.expert_bytes
            n_matrices = len(layer.matrices)
            for device in range(n_devices):
                last = shards[device][-n_matrices:]
                layers[device].append(replace(layer, matrices=tuple(piece.matrix for piece in last)))
        tables = tuple(replace(table, layers=tuple(of_device)) for of_device in layers)
        return cls(table, tables, tuple(tuple(of_device) for of_device in shards))

    @property
    def n_devices(self) -> int:
        """How many devices share the model."""
        return len(self.tables)

    def find(self, device: int, span: Span) -> ShardRef:
        """Return the shard at `span` of the device's imagined file. Raises `ValueError` where it is not one shard."""
        shards = self.shards[device]
        number = bisect.bisect_right(shards, span.offset, key=lambda piece: piece.matrix.file_offset) - 1
        matrix = shards[number].matrix
        expert, within = divmod(span.offset - matrix.file_offset, matrix.expert_bytes)
        if within or span.n_bytes != matrix.expert_bytes:
            raise ValueError(
                f"asked for {span.n_bytes} bytes, {within} into expert {expert} of {matrix.name}: a shard is read "
                f"as a whole, {matrix.expert_bytes} bytes at once"
            )
        return ShardRef(number, expert)
