"""The structs by which C++ knows a manager's tiers, and how they follow a move of the slots."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.lookup_log import LookupLog
from expertier.planner.policy.calls.native import entry_points
from expertier.tiers.engine.binding import BoundCopy, BoundMatrix, EngineBinding, EngineLayout


class BoundStructs:
    """An `abi.Binding` and all that it points to, which must outlive the binding: C++ keeps the pointers.

    Matrices and copies of all layers lie one after another, so that a move rewrites them at once.
    """

    def __init__(
        self,
        described: EngineBinding,
        fill: Any,
        load: Any,
        read: Any,
        lookups: LookupLog | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Describe tiers to C++; `lookups` logs the experts that C++ asks for.

        `numbers` are the model's numbers of the tiers' layers, where the tiers do not have all of the model's layers.
        """
        layers = described.layers
        self._layers = (abi.Layer * len(layers))()
        self._matrices = (abi.Matrix * sum(len(layer.matrices) for layer in layers))()
        self._copies = (abi.Copy * sum(len(layer.copies) for layer in layers))()
        matrix_of_copy: list[int] = []
        n_matrices = 0
        for target, layer, first in zip(self._layers, layers, described.copies.first, strict=True):
            n_copies = len(matrix_of_copy)
            for j, matrix in enumerate(layer.matrices):
                _describe_matrix(self._matrices[n_matrices + j], matrix)
            for j, copy in enumerate(layer.copies):
                _describe_copy(self._copies[n_copies + j], copy)
            target.n_experts = layer.n_experts
            target.n_slots = layer.n_slots
            target.n_matrices = len(layer.matrices)
            target.matrices = ct.pointer(self._matrices[n_matrices])
            target.n_copies = len(layer.copies)
            target.copies = ct.pointer(self._copies[n_copies])
            target.streamed_bytes = layer.streamed_bytes
            target.first_copy = first
            matrix_of_copy += range(n_matrices, n_matrices + len(layer.copies))
            n_matrices += len(layer.matrices)
        self._matrix_of_copy = np.array(matrix_of_copy, np.int64)
        self._n_slots = _column(self._layers, abi.Layer, "n_slots", np.int32)
        self._matrix_offsets = _column(self._matrices, abi.Matrix, "offset", np.int64)
        self._copy_offsets = _column(self._copies, abi.Copy, "offset", np.int64)
        points = entry_points()
        policy = abi.Policy(**{name: getattr(points, name) for name in abi.POLICY_FUNCTIONS})
        if lookups is not None:
            policy.begin = lookups.before(points.begin, numbers)
        copies = described.copies
        self.binding = abi.Binding(
            abi=abi.PROXY_ABI,
            n_layers=len(layers),
            layers=self._layers,
            slab_base=described.slab_base,
            slab_bytes=described.slab_bytes,
            directory=described.directory_address,
            locks=described.locks_address,
            policy=policy,
            fill=fill,
            load=load,
            read=read,
            fill_context=None,
            host_copies=abi.HostCopies(copies.lock, copies.address, copies.readers, copies.used, copies.hits),
            sees_all=int(lookups is not None),
        )

    def rewrite(self, now: EngineLayout) -> None:
        """Write down where the slots lie now, and which tables say which experts are in them."""
        self.binding.directory = now.directory_address
        self._n_slots[:] = now.n_slots
        self._matrix_offsets[:] = now.offsets
        self._copy_offsets[:] = now.offsets[self._matrix_of_copy]


def _describe_matrix(target: abi.Matrix, matrix: BoundMatrix) -> None:
    target.name = matrix.name.encode()
    target.type = matrix.ggml_type
    target.ne0 = matrix.ne0
    target.ne1 = matrix.ne1
    target.expert_bytes = matrix.expert_bytes
    target.offset = matrix.offset_from_slab_base
    target.stride = matrix.stride
    target.streamed_offset = matrix.streamed_offset
    target.streamed_stride = matrix.streamed_stride


def _describe_copy(target: abi.Copy, copy: BoundCopy) -> None:
    target.source = copy.source
    target.offset = copy.offset_from_slab_base
    target.stride = copy.stride
    target.streamed_offset = copy.streamed_offset
    target.streamed_stride = copy.streamed_stride
    target.n_bytes = copy.n_bytes


def _column(structs: Any, kind: type[ct.Structure], name: str, dtype: type[np.integer]) -> npt.NDArray[Any]:
    """Return one field of all structs of an array, shared and not copied."""
    field = getattr(kind, name)
    assert field.size == np.dtype(dtype).itemsize
    row = np.dtype(
        {"names": [name], "formats": [dtype], "offsets": [field.offset], "itemsize": ct.sizeof(kind)}
    )
    return np.frombuffer(structs, row)[name]
